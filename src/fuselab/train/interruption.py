"""Ctrl-C between two steps, never in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """A flag that says whether the user, or a scheduler, has asked the run to stop."""

    asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """Note the first request; end the run at once on the second."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Make SIGINT and SIGTERM within the block only set ``asked``, which the loop checks."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # Python lets only the main thread handle signals
        return
    before = {number: signal.signal(number, interruption.ask) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
