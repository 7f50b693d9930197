"""The loop: rates, what is kept when, Ctrl-C, NaN, data that ends."""

from __future__ import annotations

import io
import os
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuselab.errors import ArgumentError, DivergenceError
from fuselab.report.progress import Progress
from fuselab.train.events import Events
from fuselab.train.loop import READ_EVERY, Loop
from fuselab.train.schedule import Schedule

CPU = torch.device("cpu")


class Run:
    """Keeps what the loop asked for."""

    def __init__(self, steps: int, keep_every: int = 0, events: Path | None = None) -> None:
        self.trained: list[tuple[int, float]] = []
        self.kept: list[int] = []
        self.at: dict[int, object] = {}
        self.shown = io.StringIO()
        self.events = Events(events)
        self.loop: Loop[int] = Loop(
            self.step,
            Schedule(1.0, steps, decay=1.0),
            CPU,
            4,
            keep=self.kept.append,
            keep_every=keep_every,
            events=self.events,
            progress=Progress(self.shown),
        )

    def step(self, batch: int, rate: float) -> Tensor:
        self.trained.append((batch, rate))
        special = self.at.get(batch)
        if isinstance(special, signal.Signals):
            os.kill(os.getpid(), special)
        return torch.tensor(special if isinstance(special, float) else float(batch))


def _from(first: int) -> Iterator[int]:
    return iter(count(first))


def test_every_step_once_with_its_rate() -> None:
    run = Run(4, keep_every=2)
    course = run.loop.run(_from(0))
    assert run.trained == [(0, 1.0), (1, 0.75), (2, 0.5), (3, 0.25)]
    assert run.kept == [2, 4]
    assert (course.steps, course.interrupted) == (4, False)
    assert course.curve == [(2, 0.5), (4, 2.5)]
    assert "step 4 of 4  loss 2.5000" in run.shown.getvalue()


def test_resumes_in_the_middle_and_keeps_the_end() -> None:
    run = Run(5, keep_every=4)
    run.loop.run(_from(3), begin=3)
    assert run.trained == [(3, 0.4), (4, 0.2)]
    assert run.kept == [4, 5]
    assert Run(5).loop.run(_from(5), begin=5).curve == []


def test_ctrl_c_ends_behind_the_step_and_keeps_it() -> None:
    run = Run(10, keep_every=4)
    run.at = {5: signal.SIGINT}
    course = run.loop.run(_from(0))
    assert (course.steps, course.interrupted) == (6, True)
    assert run.kept == [4, 6]


def test_nan_ends_the_run_at_its_step_and_keeps_nothing_more() -> None:
    run = Run(2 * READ_EVERY, keep_every=10)
    run.at = {24: float("nan")}
    with pytest.raises(DivergenceError, match="nan") as raised:
        run.loop.run(_from(0))
    assert raised.value.step == 25
    assert run.kept == [10, 20]


def test_data_that_ends() -> None:
    with pytest.raises(ArgumentError, match="the data ended after 3 of 9 steps"):
        Run(9).loop.run(iter(range(3)))


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = Run(3, events=tmp_path / "new")
    run.loop.run(_from(0))
    run.events.close()
    found = EventAccumulator(str(tmp_path / "new"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("loss")] == [(3, 1.0)]
    assert found.Scalars("learning rate")[0].value == pytest.approx(1 / 3)
