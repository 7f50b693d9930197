"""Keep standard output for JSON: ``--json -`` prints it there, and all other text goes to
stderr."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import TextIO

NAME = "-"  # in place of a file

_kept: list[TextIO] = []


@contextlib.contextmanager
def kept_for_json() -> Iterator[None]:
    """Send to stderr what is printed inside, by processes that are started there too."""
    printed_to = sys.stdout
    is_descriptor = _is_descriptor(printed_to)
    sys.stdout.flush()
    with contextlib.ExitStack() as stack:
        if is_descriptor:
            own = os.dup(1)
            _kept.append(stack.enter_context(os.fdopen(own, "w", encoding="utf-8")))
            os.dup2(2, 1)
            stack.callback(os.dup2, own, 1)
            stack.callback(sys.stdout.flush)
        else:
            _kept.append(printed_to)
            stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        stack.callback(_kept.pop)
        yield


@contextlib.contextmanager
def given_back() -> Iterator[None]:
    """Give standard output to a process that is started inside to do all of this call."""
    if not _kept or not _is_descriptor(sys.stdout):
        yield
        return
    sys.stdout.flush()
    os.dup2(_kept[-1].fileno(), 1)
    try:
        yield
    finally:
        os.dup2(2, 1)


def is_meant(path: object) -> bool:
    """Return whether a path of ``--json`` means standard output."""
    return str(path) == NAME


def write(text: str) -> None:
    """Write to standard output, inside ``kept_for_json`` too."""
    stream = _kept[-1] if _kept else sys.stdout
    stream.write(text)
    stream.flush()


def _is_descriptor(stream: TextIO) -> bool:
    """Return whether a stream writes to descriptor 1, and not to a test's memory."""
    try:
        return stream.fileno() == 1
    except (AttributeError, OSError):
        return False
