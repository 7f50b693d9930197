"""Rounds: order, budget, early decision, and candidates that must not be timed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch

from fuselab.measure import interleave as module
from fuselab.measure.interleave import FEWEST_ROUNDS, Candidate, interleave
from fuselab.measure.verdict import LOOKS

CPU = torch.device("cpu")


class FakeTimer:
    """Notes who was sampled; times are the round's number."""

    log: ClassVar[list[str]] = []
    calls = 3
    method = "fake"
    page_faults_per_call = 0.5

    def __init__(self, call: Callable[[], object], *_: Any, **__: Any) -> None:
        self.name = str(call())
        self.rounds = 0

    def sample(self) -> float:
        FakeTimer.log.append(self.name)
        self.rounds += 1
        return float(self.rounds)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    FakeTimer.log = []
    monkeypatch.setattr(module, "timer", FakeTimer)
    return FakeTimer.log


def candidates(names: str, **options: Any) -> list[Candidate]:
    return [Candidate(name, lambda name=name: name, **options) for name in names]  # type: ignore[misc]


def test_every_round_holds_each_candidate_once_in_a_shuffled_order(fake: list[str]) -> None:
    found = interleave(candidates("abc"), CPU, decided=lambda times: True)
    rounds = ["".join(fake[at : at + 3]) for at in range(0, len(fake), 3)]
    assert len(rounds) == LOOKS[0]
    assert all(sorted(order) == ["a", "b", "c"] for order in rounds)
    assert len(set(rounds)) > 1
    assert found["a"].times_us == [float(number) for number in range(1, LOOKS[0] + 1)]
    assert (found["b"].calls_per_sample, found["b"].method) == (3, "fake")


def test_the_seed_fixes_the_order(fake: list[str]) -> None:
    orders = []
    for seed in (1, 1, 2):
        fake.clear()
        interleave(candidates("abcd"), CPU, seed=seed, decided=lambda times: True)
        orders.append(list(fake))
    assert orders[0] == orders[1] != orders[2]


def test_it_asks_at_the_looks_only_and_ends_when_decided(fake: list[str]) -> None:
    asked = []

    def decided(times: Mapping[str, Sequence[float]]) -> bool:
        asked.append(len(times["a"]))
        return len(asked) == 3

    interleave(candidates("ab"), CPU, budget_s=60, decided=decided)
    assert asked == list(LOOKS[:3])


def test_a_spent_budget_still_gives_the_fewest_rounds(fake: list[str]) -> None:
    found = interleave(candidates("ab"), CPU, budget_s=0.0)
    assert len(found["a"].times_us) == len(found["b"].times_us) == FEWEST_ROUNDS


def test_undecided_rounds_end_at_the_last_look(fake: list[str]) -> None:
    found = interleave(candidates("a"), CPU, budget_s=60)
    assert len(found["a"].times_us) == LOOKS[-1]


def test_a_candidate_wrong_before_or_after_has_no_samples_and_the_others_do(
    fake: list[str],
) -> None:
    def wrong_after(after: bool) -> str | None:
        return "stale" if after else None

    found = interleave(
        [
            Candidate("right", lambda: "right"),
            Candidate("before", lambda: "before", lambda after: "is zero"),
            Candidate("after", lambda: "after", wrong_after),
        ],
        CPU,
        decided=lambda times: True,
    )
    assert len(found["right"].times_us) == LOOKS[0] and found["right"].wrong is None
    assert (found["before"].wrong, found["before"].times_us) == ("is zero", [])
    assert (found["after"].wrong, found["after"].times_us) == ("stale", [])
    assert "before" not in fake


def test_a_candidate_that_raises_says_what(fake: list[str]) -> None:
    def broken() -> None:
        raise ValueError("no kernel\nsecond line")

    found = interleave([Candidate("broken", broken), *candidates("a")], CPU, budget_s=0)
    assert found["broken"].failed == "ValueError: no kernel"
    assert len(found["a"].times_us) == FEWEST_ROUNDS


def test_nothing_to_time_ends(fake: list[str]) -> None:
    assert interleave([], CPU) == {}
