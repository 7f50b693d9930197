"""The learning rate of every step: linear warm-up, then polynomial decay."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fuselab.errors import ArgumentError


@dataclass(frozen=True)
class Schedule:
    """A linear warm-up from 0 to ``peak`` over ``warmup`` steps, then a polynomial decay.

    In the decay the rate is ``peak`` times the remaining share of those steps, to the power of
    ``decay``: 0 keeps the rate, 1 is a line that reaches 0 one step after the last.

    Raises ArgumentError for a rate that is not above 0, or a negative ``warmup`` or ``decay``.
    """

    peak: float
    steps: int
    warmup: int = 0
    decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.peak < math.inf:
            raise ArgumentError(f"the learning rate is {self.peak}; give a number above 0.")
        if self.warmup < 0 or self.decay < 0:
            raise ArgumentError(
                f"warm-up is {self.warmup} steps and decay a power of {self.decay}; both are 0 or "
                "more."
            )

    def rate(self, step: int) -> float:
        """Return the learning rate of step ``step``, counted from 0."""
        if step < self.warmup:
            return self.peak * (step + 1) / self.warmup
        left = max(self.steps - step, 0) / max(self.steps - self.warmup, 1)
        return float(self.peak * left**self.decay)
