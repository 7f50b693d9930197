"""Medians, their intervals, quantiles, rounding."""

from __future__ import annotations

import random

import numpy
import pytest

from fuselab.measure.statistics import median_interval, quantile, quantiles, significant


@pytest.mark.parametrize(
    ("count", "confidence", "low_rank", "high_rank"),
    [
        # Ranks of the sign test's interval as statistics tables give them; below 6 the range.
        (1, 0.95, 1, 1),
        (5, 0.95, 1, 5),
        (6, 0.95, 1, 6),
        (10, 0.95, 2, 9),
        (20, 0.95, 6, 15),
        (50, 0.95, 18, 33),
        (100, 0.95, 40, 61),
        (20, 0.99, 4, 17),
    ],
)
def test_interval_of_the_median_is_the_sign_tests(
    count: int, confidence: float, low_rank: int, high_rank: int
) -> None:
    samples = [float(rank) for rank in range(1, count + 1)]
    random.Random(0).shuffle(samples)
    assert median_interval(samples, confidence) == ((count + 1) / 2, low_rank, high_rank)


def test_interval_covers_the_median_of_a_skewed_distribution_as_often_as_it_says() -> None:
    source = random.Random(1)
    true_median = 1.0  # of a lognormal with mu = 0
    covered = 0
    for _ in range(1000):
        _, low, high = median_interval([source.lognormvariate(0, 1) for _ in range(30)])
        covered += low <= true_median <= high
    assert 935 <= covered <= 985  # 95.7 % expected, +- 3 standard deviations


def test_interval_of_many_samples_is_computed_in_integers() -> None:
    middle, low, high = median_interval([float(rank) for rank in range(3000)])
    assert middle == 1499.5
    assert 1440 < low < 1450 and 1550 < high < 1560


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.5, 0.95, 1.0])
def test_quantile_is_numpys(count: int, fraction: float) -> None:
    source = random.Random(count)
    samples = [source.random() for _ in range(count)]
    assert quantile(samples, fraction) == pytest.approx(float(numpy.quantile(samples, fraction)))


def test_quantiles_are_named() -> None:
    assert quantiles([float(value) for value in range(101)]) == {
        "p05": 5.0,
        "p25": 25.0,
        "p75": 75.0,
        "p95": 95.0,
    }


@pytest.mark.parametrize(
    ("value", "rounded"),
    [(0.0, 0.0), (1.23456, 1.235), (123456.0, 123500.0), (-0.00123449, -0.001234)],
)
def test_significant(value: float, rounded: float) -> None:
    assert significant(value) == rounded
