"""The line on stderr that shows the progress of a long task."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class ProgressLine:
    """A line that is overwritten on a terminal; elsewhere a new line is printed every 10 s.

    Args:
        stream: standard error by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._rewrites = self._stream.isatty()
        self._pause_s = 0.2 if self._rewrites else 10.0
        self._shown_at = time.monotonic()
        self._width = 0

    @property
    def due(self) -> bool:
        """Whether it is time to show another text."""
        return time.monotonic() - self._shown_at >= self._pause_s

    def show(self, text: str) -> None:
        self._shown_at = time.monotonic()
        if not self._rewrites:
            print(text, file=self._stream, flush=True)
            return
        print("\r" + text.ljust(self._width), end="", file=self._stream, flush=True)
        self._width = len(text)

    def end(self) -> None:
        """End the line, so that the next output begins on a new one."""
        if self._width:
            print(file=self._stream, flush=True)
            self._width = 0
