"""Learning rates at the edges: first and last step, end of the warm-up, no steps left."""

from __future__ import annotations

import pytest

from fuselab.errors import ArgumentError
from fuselab.train.schedule import Schedule


def test_warm_up_is_a_line_that_ends_at_the_peak() -> None:
    schedule = Schedule(0.8, steps=100, warmup=4)
    assert [schedule.rate(step) for step in range(6)] == pytest.approx(
        [0.2, 0.4, 0.6, 0.8, 0.8, 0.8]
    )


def test_decay_is_a_polynomial_of_what_is_left() -> None:
    schedule = Schedule(1.0, steps=12, warmup=2, decay=2.0)
    assert schedule.rate(2) == 1.0
    assert schedule.rate(7) == pytest.approx(0.25)
    assert schedule.rate(11) == pytest.approx(0.01)
    assert schedule.rate(12) == schedule.rate(13) == 0.0


def test_without_both_the_rate_stays() -> None:
    assert {Schedule(0.1, steps=3).rate(step) for step in (0, 1, 2, 3, 9)} == {0.1}
    assert Schedule(0.1, steps=2, warmup=5, decay=1.0).rate(1) == pytest.approx(0.04)


@pytest.mark.parametrize("wrong", [{"peak": 0.0}, {"peak": float("nan")}, {"warmup": -1}])
def test_refuses(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError):
        Schedule(**{"peak": 0.1, "steps": 3, **wrong})  # type: ignore[arg-type]
