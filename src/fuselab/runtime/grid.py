"""Arithmetic for launches: the blocks that cover a length, and powers of two for block sizes."""

from __future__ import annotations


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def power_of_two(number: int, low: int = 1, high: int = 2**62) -> int:
    """Return the least power of two from ``number`` on, clamped to ``low`` and ``high``."""
    return min(max(1 << max(number - 1, 0).bit_length(), low), high)
