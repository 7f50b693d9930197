"""The search for the simplest list of choices that still fails."""

from __future__ import annotations

from collections.abc import Callable, Sequence


def shrink(
    choices: Sequence[int], fails: Callable[[Sequence[int]], Sequence[int] | None], tries: int = 80
) -> list[int]:
    """Return the simplest list found that still fails, after at most ``tries`` calls of ``fails``.

    ``fails(list)`` replays a list and returns the choices it really used, or None when the case
    passes (or cannot be made). Calls are counted instead of time, so that a seed repeats the
    result.
    """
    best = list(choices)
    left = tries

    def attempt(candidate: list[int]) -> bool:
        nonlocal best, left
        if left <= 0 or candidate == best:
            return False
        left -= 1
        used = fails(candidate)
        if used is None or (len(used), list(used)) >= (len(best), best):
            return False
        best = list(used)
        return True

    for keep in range(0, len(best), max(1, len(best) // 4)):
        if attempt(best[:keep]):
            break
    improved = True
    while improved and left > 0:
        improved = False
        for place in range(len(best)):
            if place >= len(best):
                break
            for lower in _lower(best[place]):
                if attempt([*best[:place], lower, *best[place + 1 :]]):
                    improved = True
                    break
    return best


def _lower(value: int) -> list[int]:
    """Return numbers below ``value`` worth trying, the smallest first."""
    return sorted({0, 1, value // 2, value - 1} & set(range(value)))
