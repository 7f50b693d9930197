"""The progress line of a training run on stderr: steps, loss, rate, time left."""

from __future__ import annotations

import time
from collections import deque
from typing import TextIO

from fuselab.report.progress_line import ProgressLine

_WINDOW = 50  # updates over which the rate is taken


class Progress:
    """The progress of one run.

    Args:
        steps: of the whole run.
        rows_per_step: rows of a batch.
        stream: standard error by default.
    """

    def __init__(self, steps: int, rows_per_step: int, stream: TextIO | None = None) -> None:
        self.steps, self.rows_per_step = steps, rows_per_step
        self.seen: deque[tuple[float, int]] = deque(maxlen=_WINDOW)
        self._shown = ProgressLine(stream)

    def begin(self, step: int) -> None:
        """Start measuring the rate here."""
        self.seen.clear()
        self.seen.append((time.monotonic(), step))

    def update(self, step: int, loss: float) -> None:
        """Show that ``step`` steps are done; ``loss`` is the mean of the last of them."""
        self.seen.append((time.monotonic(), step))
        if self._shown.due or step == self.steps:
            self._shown.show(self.line(step, loss))

    def line(self, step: int, loss: float) -> str:
        text = f"step {step:,} of {self.steps:,}  loss {loss:.4f}"
        rate = self.steps_per_s
        if rate is None:
            return text
        left = clock((self.steps - step) / rate)
        return f"{text}  {rate * self.rows_per_step:,.0f} rows/s  {left} left"

    @property
    def steps_per_s(self) -> float | None:
        """The rate over the last updates; None before there are two."""
        if len(self.seen) < 2:
            return None
        (begin, first), (end, last) = self.seen[0], self.seen[-1]
        return (last - first) / (end - begin) if end > begin and last > first else None

    def close(self) -> None:
        """End the line."""
        self._shown.end()


def clock(seconds: float) -> str:
    """Format seconds as ``1:02:03`` or ``2:03``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
