"""The format of numbers, the same on the screen, on the pages and in the sentences of both.

A result file holds four significant digits (``measure.statistics.significant``). Tables of
benchmarks show all four (``digits``). Everything that a person reads as a sentence or compares at a
glance shows three, and a share has one place behind the point (``duration``, ``share``, ...).
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


def three(value: float) -> str:
    """Format three significant digits without an exponent: 0.0123, 1.23, 12.3, 1230."""
    if value == 0 or not isfinite(value):
        return f"{value:.0f}"
    value = significant(value, 3)
    return f"{value:.{max(0, 2 - floor(log10(abs(value))))}f}"


def percent_of_limit(share: float | None) -> str:
    """Format a share of the limit in per cent, in five characters: 0.155, 99.96, 11780, <0.1."""
    if share is None:
        return NONE
    percent = 100 * share
    text = digits(percent)
    if len(text) <= 5:
        return text
    return three(percent) if percent >= 0.1 else "<0.1"


def duration(us: float | None) -> str:
    """Format microseconds as ns, µs, ms or s, with at most three digits in front of the point."""
    if us is None:
        return NONE
    us = significant(us, 3)
    if not isfinite(us):
        return f"{three(us)} µs"
    if 0 < abs(us) < 0.1:
        return f"{three(us * 1_000)} ns"
    if abs(us) < 1_000:
        return f"{three(us)} µs"
    if abs(us) < 1_000_000:
        return f"{three(us / 1_000)} ms"
    return f"{three(us / 1_000_000)} s"


def share(value: float | None) -> str:
    """Format a share in per cent, with one place behind the point below 100 %: 0.8731 as 87.3 %.

    A share that would be written as 0.0 % is written as <0.1 %.
    """
    if value is None:
        return NONE
    percent = 100 * value
    if percent == 0 or not isfinite(percent):
        return f"{percent:.0f} %"
    if 0 < percent < 0.05:
        return "<0.1 %"
    return f"{percent:.1f} %" if abs(percent) < 99.95 else f"{three(percent)} %"


def ratio(value: float | None) -> str:
    """Format a ratio: 1.234 as 1.23×."""
    return NONE if value is None else f"{three(value)}×"


def byte_count(count: float | None) -> str:
    """Format bytes in decimal units, as bandwidths are: 512 B, 48.2 MB."""
    if count is None:
        return NONE
    if abs(count) < 1_000:
        return f"{count:.0f} B"
    for unit, size in (("kB", 1e3), ("MB", 1e6), ("GB", 1e9)):
        if abs(significant(count, 3)) < 1_000 * size:
            return f"{three(count / size)} {unit}"
    return f"{three(count / 1e12)} TB"


def rate(gbps: float | None) -> str:
    """Format a bandwidth in GB/s."""
    if gbps is None:
        return NONE
    return f"{three(gbps)} GB/s" if gbps >= 0.001 or gbps <= 0 else "<0.001 GB/s"


def tflops(value: float | None) -> str:
    """Format an arithmetic rate given in TFLOP/s; below 1 it is shown in GFLOP/s."""
    if value is None:
        return NONE
    return f"{three(value)} TFLOP/s" if value >= 1 else f"{three(1_000 * value)} GFLOP/s"


def ulp(value: float | None) -> str:
    """Format an error in units in the last place; above 1000 it is only said to be more.

    A result that cancels to nearly nothing has tiny units, so a huge count of them says only that.
    """
    if value is None:
        return NONE
    return f"{three(value)} ulp" if value <= 1_000 else ">1000 ulp"


def count(value: float | None) -> str:
    """Format a count, which is whole except as an average over steps: 12,345 or 2.5."""
    if value is None:
        return NONE
    if value == int(value):
        return f"{value:,.0f}"
    return f"{value:,.0f}" if abs(value) >= 1_000 else three(value).rstrip("0").rstrip(".")
