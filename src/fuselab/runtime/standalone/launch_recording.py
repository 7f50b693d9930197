"""Watching the launches of a call: a standalone package keeps no plans, so nobody watches."""

from __future__ import annotations

import contextlib


def unseen() -> contextlib.AbstractContextManager[None]:
    """Return a context in which PyTorch operators run as they do outside."""
    return contextlib.nullcontext()
