"""Ctrl-C between two steps, never in the middle of one."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interruption:
    """Whether the user, or a scheduler, has asked the run to stop."""

    asked = False

    def ask(self, number: int, frame: FrameType | None) -> None:
        """The first request is noted; a second one ends the run at once."""
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


@contextlib.contextmanager
def interruptible() -> Iterator[Interruption]:
    """Within the block SIGINT and SIGTERM only set ``asked``, for the loop to look at."""
    interruption = Interruption()
    if threading.current_thread() is not threading.main_thread():
        yield interruption  # Python lets the main thread alone handle signals
        return
    before = {number: signal.signal(number, interruption.ask) for number in _SIGNALS}
    try:
        yield interruption
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
