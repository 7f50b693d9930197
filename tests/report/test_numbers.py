"""The spelling of numbers: four digits, never more nor fewer, units at their boundaries."""

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
        (0.5, "0.5000 µs"),
        (999.94, "999.9 µs"),
        (999.96, "1.000 ms"),
        (1_000.0, "1.000 ms"),
        (41_230.0, "41.23 ms"),
        (999_960.0, "1.000 s"),
        (104.2e6, "104.2 s"),
    ],
)
def test_duration(us: float | None, text: str) -> None:
    assert numbers.duration(us) == text


def test_the_rest() -> None:
    assert numbers.share(0.87312) == "87.31 %"
    assert numbers.ratio(2.0) == "2.000×"
    assert numbers.rate(36.4) == "36.40 GB/s"
    assert numbers.tflops(0.0587) == "58.70 GFLOP/s"
    assert numbers.tflops(356.0) == "356.0 TFLOP/s"
    assert numbers.ulp(0.5) == "0.5000 ulp"
    assert numbers.byte_count(999) == "999 B"
    assert numbers.byte_count(999_960) == "1.000 MB"
    assert numbers.byte_count(48_200_000) == "48.20 MB"
    assert numbers.byte_count(2.5e12) == "2.500 TB"
    assert numbers.count(12345.0) == "12,345"
    assert numbers.count(2.5) == "2.500"
    for spell in (numbers.share, numbers.ratio, numbers.rate, numbers.byte_count, numbers.count):
        assert spell(None) == "–"
