"""The format of numbers, the same on the screen, on the pages and in the sentences of both.

Values come rounded to four significant digits (``measure.statistics.significant``) and all four are
shown, so that every view shows the same digits as the JSON.
"""

from __future__ import annotations

from math import floor, isfinite, log10

from fuselab.measure.statistics import significant

NONE = "–"


def digits(value: float) -> str:
    """Format four significant digits without an exponent: 0.01234, 1.230, 12.34, 1234, 123400."""
    if value == 0 or not isfinite(value):
        return f"{value:.0f}"
    value = significant(value)
    return f"{value:.{max(0, 3 - floor(log10(abs(value))))}f}"


def duration(us: float | None) -> str:
    """Format microseconds as us, ms or s, with at most three digits in front of the point."""
    if us is None:
        return NONE
    us = significant(us)
    if abs(us) < 1_000 or not isfinite(us):
        return f"{digits(us)} µs"
    if abs(us) < 1_000_000:
        return f"{digits(us / 1_000)} ms"
    return f"{digits(us / 1_000_000)} s"


def share(value: float | None) -> str:
    """Format a share in per cent: 0.8731 as 87.31 %."""
    return NONE if value is None else f"{digits(100 * value)} %"


def ratio(value: float | None) -> str:
    """Format a ratio: 1.234 as 1.234×."""
    return NONE if value is None else f"{digits(value)}×"


def byte_count(count: float | None) -> str:
    """Format bytes in decimal units, as bandwidths are: 512 B, 48.20 MB."""
    if count is None:
        return NONE
    if abs(count) < 1_000:
        return f"{count:.0f} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(significant(count)) < 1_000 * size:
            return f"{digits(count / size)} {unit}"
    return f"{digits(count / 1e12)} TB"


def rate(gbps: float | None) -> str:
    """Format a bandwidth in GB/s."""
    return NONE if gbps is None else f"{digits(gbps)} GB/s"


def tflops(value: float | None) -> str:
    """Format an arithmetic rate given in TFLOP/s; below 1 it is shown in GFLOP/s."""
    if value is None:
        return NONE
    return f"{digits(value)} TFLOP/s" if value >= 1 else f"{digits(1_000 * value)} GFLOP/s"


def ulp(value: float | None) -> str:
    """Format an error in units in the last place."""
    return NONE if value is None else f"{digits(value)} ulp"


def count(value: float | None) -> str:
    """Format a count, which is whole except as an average over steps."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value == int(value) else digits(value)
