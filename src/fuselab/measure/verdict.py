"""Verdicts FASTER, SLOWER, SAME or UNCLEAR, from paired rounds, that a rerun would repeat.

Two candidates are timed in the same rounds, so clock drift and other processes affect both. The
verdict uses the median of the per-round speedups and its 99.8 % interval. Only an interval wholly
outside the band of +-2 % is FASTER or SLOWER, only one wholly inside is SAME; everything else is
UNCLEAR and needs more rounds. Testing growing data again and again finds a difference sooner or
later by chance, so it is tested at doubling counts only (``LOOKS``), and the confidence keeps all
of these tests together under 1 % false verdicts (counted in tests/measure/test_verdict.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from fuselab.errors import ArgumentError
from fuselab.measure.statistics import median_interval

BAND = 0.02
UNPAIRED_BAND = 0.05  # of two runs that were not interleaved
CONFIDENCE = 0.998
# The fewest rounds whose whole range covers the median with this confidence.
FEWEST_ROUNDS = 10
LOOKS = (12, 24, 48, 96, 192, 384, 768)


class Outcome(StrEnum):
    """The outcome of a comparison of two candidates."""

    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    UNCLEAR = "UNCLEAR"


@dataclass(frozen=True)
class Verdict:
    """The verdict on A against B.

    ``speedup`` is B's time over A's, the median over rounds, so above 1 means that A is faster;
    ``low`` and ``high`` bound it; with fewer than ``FEWEST_ROUNDS`` they are only the range.
    """

    outcome: Outcome
    speedup: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        """Return the outcome with the interval, which too few rounds do not have."""
        bounds = f"{self.low:.3f} to {self.high:.3f}"
        if self.rounds < FEWEST_ROUNDS:
            bounds = f"{self.rounds} rounds, of which {FEWEST_ROUNDS} are needed"
        return f"{self.outcome} {self.speedup:.3f}x ({bounds})"


def verdict(
    times: Sequence[float],
    against: Sequence[float],
    *,
    band: float = BAND,
    confidence: float = CONFIDENCE,
) -> Verdict:
    """Judge the candidate that took ``times`` against the one that took ``against``.

    Both hold one time per round, in the same order and unit. Raises ArgumentError when they do not
    pair up. With too few rounds for the confidence the verdict is UNCLEAR.
    """
    if len(times) != len(against) or not times:
        raise ArgumentError(
            f"a verdict needs the same number of rounds on both sides, at least one; "
            f"got {len(times)} and {len(against)}."
        )
    ratios = [theirs / ours for ours, theirs in zip(times, against, strict=True)]
    speedup, low, high = median_interval(ratios, confidence)
    return Verdict(
        _outcome(low, high, len(ratios), band, confidence), speedup, low, high, len(ratios)
    )


def unpaired(
    times: tuple[float, float, float], against: tuple[float, float, float], rounds: int
) -> Verdict:
    """Judge two runs that were not interleaved, each by its median and the interval around it.

    Clock and load may have changed between them, so a difference counts only where the intervals
    lie more than 5 % apart. ``rounds`` is the smaller number of rounds; with too few for an
    interval the verdict is UNCLEAR.
    """
    us, low_us, high_us = times
    then_us, then_low_us, then_high_us = against
    speedup, low, high = then_us / us, then_low_us / high_us, then_high_us / low_us
    if rounds < FEWEST_ROUNDS:
        outcome = Outcome.UNCLEAR
    elif high < 1 / (1 + UNPAIRED_BAND):
        outcome = Outcome.SLOWER
    elif low > 1 + UNPAIRED_BAND:
        outcome = Outcome.FASTER
    elif low >= 1 / (1 + UNPAIRED_BAND) and high <= 1 + UNPAIRED_BAND:
        outcome = Outcome.SAME
    else:
        outcome = Outcome.UNCLEAR
    return Verdict(outcome, speedup, low, high, rounds)


def _outcome(low: float, high: float, rounds: int, band: float, confidence: float) -> Outcome:
    if 0.5 ** (rounds - 1) > 1 - confidence:  # even the whole range covers less than asked
        return Outcome.UNCLEAR
    if low > 1 + band:
        return Outcome.FASTER
    if high < 1 / (1 + band):
        return Outcome.SLOWER
    if low >= 1 / (1 + band) and high <= 1 + band:
        return Outcome.SAME
    return Outcome.UNCLEAR
