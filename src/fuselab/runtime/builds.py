"""Runs of compilers: side by side in threads, and announced once per process."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from fuselab.runtime import cache

QUIET = "FUSELAB_QUIET"
# The niceness that a build gets if no call waits for it, so that builds that a call waits for run
# first.
BACKGROUND_NICENESS = 10

Built = TypeVar("Built")

_in_background: set[Future[Any]] = set()  # those that have not ended
_announcing = threading.Lock()
_announced = False


def announce(what: str) -> None:
    """Print one line to stderr, once per process, that ``what`` is compiled and where it is kept.

    ``FUSELAB_QUIET=1`` in the environment silences it.
    """
    global _announced
    with _announcing:
        if _announced or os.environ.get(QUIET, "0") not in ("", "0"):
            return
        _announced = True
    print(
        f"fuselab: compiling {what} and whatever else this process needs, once: it is kept in "
        f"{cache.folder()}, and the next process will not compile it ({QUIET}=1 hides this line).",
        file=sys.stderr,
        flush=True,
    )


def in_background(
    build: Callable[[], Built], niceness: int = 0, daemon: bool = False
) -> Future[Built]:
    """Run ``build`` in a thread of its own and return its future result.

    The compiler that the thread starts inherits its ``niceness``. The process waits for the thread
    before it ends, unless it is a ``daemon`` thread.
    """
    result: Future[Built] = Future()
    _in_background.add(result)
    result.add_done_callback(_in_background.discard)

    def run() -> None:
        if niceness and sys.platform == "linux":  # there a thread has a priority of its own
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        try:
            result.set_result(build())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, name="fuselab-build", daemon=daemon).start()
    return result


def wait_for_background(timeout_s: float) -> None:
    """Wait until what ``in_background`` has started has ended, at most so many seconds."""
    wait(tuple(_in_background), timeout_s)
