"""Mute what a TARGET prints: its first step is heard, and the thousands that are timed are not."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what Python prints on standard output inside.

    A step with a ``print`` is called thousands of times to time it, and would hide the result.
    """
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
