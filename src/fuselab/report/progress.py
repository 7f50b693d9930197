"""The progress of long work on stderr, for training runs, passes over rows and builds."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import TextIO

_WINDOW = 50  # updates over which the rate is taken


def say(text: str) -> None:
    """Print a line of progress on stderr."""
    print(text, file=sys.stderr)


class Progress:
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

    def begin(self, what: str, total: int, done: int = 0) -> None:
        """Begin a task of ``total`` parts or steps, of which ``done`` are done; measure from
        here."""
        self._what, self._total = what, total
        self._seen = deque([(time.monotonic(), done, 0)], maxlen=_WINDOW)

    def update(self, rows: int, done: int = 1, note: str = "") -> None:
        """Count ``done`` more parts with ``rows`` rows in all, and show the line if it is time."""
        _, before, rows_before = self._seen[-1]
        self._seen.append((time.monotonic(), before + done, rows_before + rows))
        last = before + done == self._total
        if last or time.monotonic() - self._shown_at >= self._pause_s:
            self.show(self.line(note))
        if last:
            self.end()

    def line(self, note: str = "") -> str:
        """Return what is done, then ``note`` or the rows, then the rate over the last updates and
        the time left once there are two updates."""
        (begin, first, first_rows), (end, done, rows) = self._seen[0], self._seen[-1]
        text = f"{self._what} {done:,} of {self._total:,}"
        text += f"  {note}" if note else f" parts, {rows:,} rows"
        if end <= begin or done <= first:
            return text
        left = clock((self._total - done) * (end - begin) / (done - first))
        return f"{text}  {(rows - first_rows) / (end - begin):,.0f} rows/s  {left} left"

    def show(self, text: str) -> None:
        """Show ``text`` in the place of the text before; in a file, below it."""
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


def clock(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
