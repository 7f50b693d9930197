"""The check of a run's seed, since torch would answer an invalid one with a traceback."""

from __future__ import annotations

from fuselab.errors import ArgumentError


def check_seed(seed: int) -> None:
    """Raise ArgumentError if ``seed`` is below 0 or does not fit 63 bits."""
    if not 0 <= seed < 2**63:
        raise ArgumentError(f"--seed is {seed}; give 0 to 2^63 - 1.")
