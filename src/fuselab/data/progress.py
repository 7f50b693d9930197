"""The line on stderr that says how far a long walk over rows is: parts, rows, rate, time left."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """One line that is written over on a terminal, and a new one every 10 s elsewhere."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._rewrites = self._stream.isatty()
        self._pause_s = 0.2 if self._rewrites else 10.0
        self._shown_at = self._began_at = time.monotonic()
        self._width = 0

    def begin(self, what: str, parts: int) -> None:
        """Another walk, of ``parts`` parts that are still to do."""
        self._what, self._parts, self._done, self._rows = what, parts, 0, 0
        self._began_at = time.monotonic()

    def update(self, rows: int) -> None:
        """Another part is done."""
        self._done += 1
        self._rows += rows
        now = time.monotonic()
        last = self._done == self._parts
        if not last and now - self._shown_at < self._pause_s:
            return
        self._shown_at = now
        seconds = max(now - self._began_at, 1e-9)
        left = seconds / self._done * (self._parts - self._done)
        text = (
            f"{self._what}: {self._done:,} of {self._parts:,} parts, {self._rows:,} rows, "
            f"{self._rows / seconds:,.0f} rows/s" + ("" if last else f", {left:,.0f} s left")
        )
        if not self._rewrites:
            print(text, file=self._stream, flush=True)
            return
        end = "\n" if last else ""
        print("\r" + text.ljust(self._width), end=end, file=self._stream, flush=True)
        self._width = 0 if last else len(text)
