"""Medians, their intervals and quantiles of timing samples, without assuming a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from statistics import median as _median

QUANTILES = (0.05, 0.25, 0.75, 0.95)


@lru_cache(maxsize=4096)
def _tail_count(count: int, confidence: float) -> int:
    """Return how many order statistics each side of the interval leaves out.

    It is the largest k with P(Binomial(count, 1/2) < k) <= (1 - confidence) / 2, in exact integers.
    """
    allowed = (1 - confidence) / 2
    total, term, left_out = 0, 1, 0
    whole = 1 << count
    for k in range(count):
        total += term
        if total / whole > allowed:
            break
        left_out = k + 1
        term = term * (count - k) // (k + 1)
    return left_out


def median_interval(
    samples: Sequence[float], confidence: float = 0.95
) -> tuple[float, float, float]:
    """Return the median of ``samples`` and the two order statistics that bound it with
    ``confidence``.

    The interval is the sign test's (David and Nagaraja, Order Statistics, 7.1): exact for any
    distribution, no seed. With too few samples for the confidence (fewer than 6 for 95 %, 8 for 99
    %) it is the whole range, which covers less.
    """
    ordered = sorted(samples)
    left_out = max(_tail_count(len(ordered), confidence), 1)
    return _median(ordered), ordered[left_out - 1], ordered[-left_out]


def quantile(samples: Sequence[float], fraction: float) -> float:
    """Return a quantile of ``samples``, linear between order statistics (numpy's default)."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """Return the quantiles that results carry, keyed ``p05``, ``p25``, ``p75``, ``p95``."""
    return {f"p{round(100 * fraction):02d}": quantile(samples, fraction) for fraction in QUANTILES}


def significant(value: float, digits: int = 4) -> float:
    """Round ``value`` to ``digits`` significant digits.

    Results carry rounded values, so that every view of a result rounds the same number; a timing is
    not known to more than four digits.
    """
    return float(f"{value:.{digits}g}")
