"""Verdicts: exact on constructed samples, and their error rates on simulated noisy timers."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from fuselab.errors import ArgumentError
from fuselab.measure.verdict import FEWEST_ROUNDS, LOOKS, Outcome, verdict


@pytest.mark.parametrize(
    ("ours", "theirs", "outcome"),
    [
        (10.0, 10.0, Outcome.SAME),
        (10.0, 10.19, Outcome.SAME),
        (10.0, 10.3, Outcome.FASTER),
        (10.3, 10.0, Outcome.SLOWER),
        (10.19, 10.0, Outcome.SAME),
    ],
)
def test_without_noise_the_band_decides(ours: float, theirs: float, outcome: Outcome) -> None:
    found = verdict([ours] * 12, [theirs] * 12)
    assert found.outcome is outcome
    assert found.speedup == pytest.approx(theirs / ours)
    assert (found.low, found.high, found.rounds) == (found.speedup, found.speedup, 12)


def test_too_few_rounds_are_unclear_however_far_apart() -> None:
    assert verdict([1.0] * 9, [2.0] * 9).outcome is Outcome.UNCLEAR
    assert verdict([1.0] * 10, [2.0] * 10).outcome is Outcome.FASTER


def test_a_verdict_of_too_few_rounds_shows_no_interval() -> None:
    assert FEWEST_ROUNDS == 10, "the counts above"
    few, enough = verdict([1.0] * 9, [2.0] * 9), verdict([1.0] * 10, [2.0] * 10)
    assert str(few) == "UNCLEAR 2.000x (9 rounds, of which 10 are needed)"
    assert str(enough) == "FASTER 2.000x (2.000 to 2.000)"


def test_an_interval_across_the_band_is_unclear() -> None:
    assert verdict([10.0] * 20, [9.7, 10.3] * 10).outcome is Outcome.UNCLEAR


def test_swapping_the_sides_turns_the_verdict_round() -> None:
    source = random.Random(3)
    ours = [source.gauss(10, 0.2) for _ in range(24)]
    theirs = [source.gauss(12, 0.2) for _ in range(24)]
    one, other = verdict(ours, theirs), verdict(theirs, ours)
    assert (one.outcome, other.outcome) == (Outcome.FASTER, Outcome.SLOWER)
    assert one.low == pytest.approx(1 / other.high)


def test_rounds_must_pair_up() -> None:
    with pytest.raises(ArgumentError, match="same number of rounds"):
        verdict([1.0, 2.0], [1.0])
    with pytest.raises(ArgumentError):
        verdict([], [])


def simulated(source: random.Random, true_speedup: float, noise: float) -> Outcome:
    """One sequential comparison of two timers: common drift, noise of each, one round in twenty
    disturbed by a neighbour; looks at the counts that ``interleave`` looks at."""
    ours: list[float] = []
    theirs: list[float] = []
    drift = 1.0
    for done in range(1, LOOKS[-2] + 1):
        drift *= source.lognormvariate(0, 0.02)
        for times, level in ((ours, 10.0), (theirs, 10.0 * true_speedup)):
            disturbance = source.uniform(1.2, 3) if source.random() < 0.05 else 1.0
            times.append(level * drift * disturbance * source.lognormvariate(0, noise))
        if done in LOOKS:
            outcome = verdict(ours, theirs).outcome
            if outcome is not Outcome.UNCLEAR:
                return outcome
    return Outcome.UNCLEAR


@pytest.mark.parametrize(
    ("true_speedup", "noise", "right"),
    [
        (1.0, 0.01, Outcome.SAME),
        (1.0, 0.03, Outcome.SAME),
        (1.06, 0.03, Outcome.FASTER),
        (1 / 1.06, 0.03, Outcome.SLOWER),
        (1.5, 0.3, Outcome.FASTER),
    ],
)
def test_verdicts_on_noisy_timers_are_right_and_repeat(
    true_speedup: float, noise: float, right: Outcome
) -> None:
    source = random.Random(17)
    runs = 300
    counts = Counter(simulated(source, true_speedup, noise) for _ in range(runs))
    false = runs - counts[right] - counts[Outcome.UNCLEAR]
    assert false <= 0.01 * runs, counts
    assert counts[right] >= 0.95 * runs, counts


@pytest.mark.parametrize("edge", [1.02, 1 / 1.02])
def test_at_the_edge_of_the_band_most_runs_say_unclear_and_none_says_the_opposite(
    edge: float,
) -> None:
    source = random.Random(5)
    counts = Counter(simulated(source, edge, 0.02) for _ in range(300))
    opposite = Outcome.SLOWER if edge > 1 else Outcome.FASTER
    assert counts[opposite] == 0
    assert counts[Outcome.UNCLEAR] >= 0.98 * 300, counts
