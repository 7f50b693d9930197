"""The spelling of numbers: four digits in tables, three elsewhere, units at their boundaries."""

from __future__ import annotations

import math

import pytest

from fuselab.report import numbers


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012344, "0.01234"),
        (1.0, "1.000"),
        (-1.23449, "-1.234"),
        (12.3, "12.30"),
        (999.96, "1000"),
        (99.999, "100.0"),
        (123_456.0, "123500"),
        (math.inf, "inf"),
        (math.nan, "nan"),
    ],
)
def test_digits(value: float, text: str) -> None:
    assert numbers.digits(value) == text


@pytest.mark.parametrize(
    ("us", "text"),
    [
        (None, "–"),
        (0.0, "0 µs"),
        (0.05, "50.0 ns"),
        (0.5, "0.500 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (1_000.0, "1.00 ms"),
        (41_230.0, "41.2 ms"),
        (999_600.0, "1.00 s"),
        (104.2e6, "104 s"),
        (-1_234.0, "-1.23 ms"),
    ],
)
def test_duration(us: float | None, text: str) -> None:
    assert numbers.duration(us) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0 %"),
        (0.0006198, "0.1 %"),
        (0.0004, "<0.1 %"),
        (0.0031, "0.3 %"),
        (0.87312, "87.3 %"),
        (0.9994, "99.9 %"),
        (0.9996, "100 %"),
        (1.034, "103 %"),
        (-0.0123, "-1.2 %"),
    ],
)
def test_share(value: float, text: str) -> None:
    assert numbers.share(value) == text


@pytest.mark.parametrize(
    ("per_cent", "text"),
    [(0.1552, "0.155"), (0.0123, "<0.1"), (1.254, "1.254"), (99.96, "99.96"), (11780, "11780")],
)
def test_percent_of_limit_fits_its_column(per_cent: float, text: str) -> None:
    assert numbers.percent_of_limit(per_cent / 100) == text


def test_the_rest() -> None:
    assert numbers.ratio(2.0) == "2.00×"
    assert numbers.rate(36.4) == "36.4 GB/s"
    assert numbers.tflops(0.0587) == "58.7 GFLOP/s"
    assert numbers.tflops(356.4) == "356 TFLOP/s"
    assert numbers.ulp(0.5) == "0.500 ulp"
    assert numbers.ulp(1.3e6) == ">1000 ulp"
    assert numbers.byte_count(999) == "999 B"
    assert numbers.byte_count(999_600) == "1.00 MB"
    assert numbers.byte_count(48_210_000) == "48.2 MB"
    assert numbers.byte_count(2.5e12) == "2.50 TB"
    assert numbers.count(12345.0) == "12,345"
    assert numbers.count(2.5) == "2.5"
    assert numbers.count(221.37) == "221"
    assert numbers.percent_of_limit(None) == "–"
    for spell in (numbers.share, numbers.ratio, numbers.rate, numbers.byte_count, numbers.count):
        assert spell(None) == "–"
