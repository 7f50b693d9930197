"""The progress line of a long pass over rows: parts, rows, rate, time left."""

from __future__ import annotations

import time
from typing import TextIO

from fuselab.report.progress_line import ProgressLine


class Progress:
    """The progress of passes, one after another; ``stream`` is standard error by default."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._line = ProgressLine(stream)

    def begin(self, what: str, parts: int) -> None:
        """Begin another pass, of ``parts`` parts that are still to do."""
        self._what, self._parts, self._done, self._rows = what, parts, 0, 0
        self._began_at = time.monotonic()

    def update(self, rows: int) -> None:
        """Count another part as done, and show the progress if it is time."""
        self._done += 1
        self._rows += rows
        last = self._done == self._parts
        if not last and not self._line.due:
            return
        seconds = max(time.monotonic() - self._began_at, 1e-9)
        left = seconds / self._done * (self._parts - self._done)
        self._line.show(
            f"{self._what}: {self._done:,} of {self._parts:,} parts, {self._rows:,} rows, "
            f"{self._rows / seconds:,.0f} rows/s" + ("" if last else f", {left:,.0f} s left")
        )
        if last:
            self._line.end()
