"""Mute what a TARGET prints: its first step is heard, and the thousands that are timed are not."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator

_HEARD = ("torch", "fuselab")  # whose loggers speak about the step, and not in it


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Drop what Python prints on standard output inside, and what loggers write on the screen.

    A step with a ``print`` is called thousands of times to time it, and would hide the result.
    """
    with contextlib.ExitStack() as stack:
        for handler in _on_screen():
            handler.addFilter(_is_heard)
            stack.callback(handler.removeFilter, _is_heard)
        nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
        stack.enter_context(contextlib.redirect_stdout(nowhere))
        yield


def _is_heard(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] in _HEARD


def _on_screen() -> list[logging.Handler]:
    """Return the handlers of all loggers that write to standard output or standard error."""
    screens = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    loggers = [logging.getLogger(), *logging.Logger.manager.loggerDict.values()]
    found = [h for one in loggers if isinstance(one, logging.Logger) for h in one.handlers]
    found += [logging.lastResort] if logging.lastResort is not None else []
    return [h for h in found if isinstance(h, logging.StreamHandler) and h.stream in screens]
