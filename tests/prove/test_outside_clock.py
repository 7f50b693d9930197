"""The clock outside: a process that is timed cannot make its own time look shorter."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from fuselab.prove import asked_timing, outside_clock
from fuselab.prove.asked_timing import Change
from fuselab.prove.held import RemoteError
from fuselab.prove.outside_clock import Clock, drawn_change, runs_at
from fuselab.prove.processes import Process


class Timed:
    """A process whose answers take the seconds that it is given, by a clock of this test."""

    def __init__(self, name: str, events: list[str], seconds: dict[str, list[float]]) -> None:
        self.name, self.events, self.seconds = name, events, seconds

    def ask(self, procedure: Callable[..., Any], *args: Any) -> float:
        self.events.append(f"{self.name} {procedure.__name__}")
        return self.seconds[procedure.__name__].pop(0)

    def pause(self) -> None:
        self.events.append(f"{self.name} pauses")

    def resume(self) -> None:
        self.events.append(f"{self.name} resumes")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    def timed(work: Callable[[], float]) -> tuple[float, list[Any]]:
        return work(), []

    monkeypatch.setattr(outside_clock, "timed", timed)
    return []


def clock_of(
    events: list[str], answer: dict[str, list[float]], beside: dict[str, list[float]]
) -> Clock:
    processes = Timed("answer", events, answer), Timed("problem", events, beside)
    return Clock(*(cast(Process, process) for process in processes))


def test_the_question_without_a_call_is_answered_beside(events: list[str]) -> None:
    clock = clock_of(events, {"calls": [5e-3]}, {"no_calls": [1e-3]})
    clock.call(Change())
    assert clock.times_us == pytest.approx([4000.0])
    assert events == ["answer pauses", "problem no_calls", "answer resumes", "answer calls"]


@pytest.mark.parametrize(
    ("first", "second", "beside", "late_us"),
    [
        (9e-3, 2e-3, 2e-3, 7000.0),  # computed when it is asked for
        (9e-3, 9e-3, 2e-3, 6400.0),  # and slow on purpose the second time
        (2e-3, 2.1e-3, 2e-3, 0.0),
    ],
)
def test_outputs_that_come_late_are_part_of_the_time(
    events: list[str], first: float, second: float, beside: float, late_us: float
) -> None:
    clock = clock_of(events, {"last_output": [first, second]}, {"last_output": [beside]})
    clock.taken()
    assert clock.late * 1e6 == pytest.approx(late_us)


def test_new_arguments_that_are_taken_slowly_are_part_of_the_time(events: list[str]) -> None:
    """A process could compute the result while it takes them."""
    clock = clock_of(events, {"renew": [8e-3, 1e-3, 7e-3], "calls": [2e-3]}, {"no_calls": [1e-3]})
    for _ in range(3):
        clock.renew([], 2e-3)
    assert events == ["answer resumes", "answer renew", "answer pauses"] * 3
    clock.call(Change())
    assert clock.times_us == pytest.approx([1000.0 + 7000.0 - 2600.0])


def seen(change: Change, args: list[Any], turns: int) -> list[tuple[float, ...]]:
    """Return what calls find in the argument that changes."""
    found = []
    for turn in range(turns):
        change.write(args, turn)
        found.append(tuple(args[change.place].tolist()))
    return found


def test_a_change_of_integers_keeps_their_values() -> None:
    chance, ids = random.Random(0), torch.arange(64)
    change = drawn_change([ids, "sum"], chance, lambda args: True)
    changed = [ids.clone(), "sum"]
    change.write(changed, 0)
    assert (changed[0] != ids).sum() == 2 and changed[0].sort().values.equal(ids)
    found = seen(change, changed, 3000)
    assert len(set(found)) == 3000 and changed[0].sort().values.equal(ids)
    assert seen(change, changed, 3000) == found
    # Where the reference refuses it, as of offsets in order, nothing is changed.
    assert drawn_change([ids], chance, lambda args: False) == Change()


def test_a_floating_argument_is_changed_before_an_integer_one() -> None:
    args = [torch.arange(64), torch.linspace(0, 1, 32)]
    change = drawn_change(args, random.Random(3), lambda args: False)
    assert change.place == 1 and not change.swaps
    change.write(args, 0)
    low, high = sorted(change.numbers)
    assert low <= float(args[1][change.indices[0]]) <= high


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_call_finds_what_an_earlier_one_has_found(dtype: torch.dtype) -> None:
    args = [torch.linspace(-1, 1, 64).to(dtype)]
    change = drawn_change(args, random.Random(4), lambda args: True)
    assert len(set(seen(change, args, 2000))) == 2000
    again = [args[0].clone()]
    assert seen(change, again, 2000)[-1] == tuple(args[0].tolist())


def test_what_raises_in_the_process_does_not_run() -> None:
    class Raises:
        def ask(self, procedure: Callable[..., Any], *args: Any) -> None:
            raise RemoteError(["RuntimeError"], "offsets must increase")

    assert not runs_at(cast(Process, Raises()), asked_timing.last_output)
