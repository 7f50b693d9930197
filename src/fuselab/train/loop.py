"""The loop of a training run: steps, learning rate, progress, checkpoints, Ctrl-C, NaN."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from fuselab.errors import ArgumentError
from fuselab.report.progress import Progress
from fuselab.train.events import Events
from fuselab.train.interruption import interruptible
from fuselab.train.losses import Losses
from fuselab.train.schedule import Schedule

READ_EVERY = 50  # steps between two reads of the losses, each of which waits for a GPU

Batch = TypeVar("Batch")


@dataclass
class Course:
    """The course of a run. ``curve`` has (steps done, mean loss since the previous point)."""

    steps: int
    interrupted: bool = False
    seconds: float = 0.0
    curve: list[tuple[int, float]] = field(default_factory=list)


@dataclass
class Loop(Generic[Batch]):
    """One run of ``schedule.steps`` steps.

    ``step(batch, rate)`` trains on a batch and returns its loss, 0-d on ``device``; nothing waits
    for it. ``keep(steps)`` writes a checkpoint: every ``keep_every`` steps (0: never in between),
    at the end, and when the user stops the run. ``add_up`` is that of ``Losses``: with it, ranks
    that train together stop together, when they next read the losses.
    """

    step: Callable[[Batch, float], Tensor]
    schedule: Schedule
    device: torch.device
    rows_per_step: int
    keep: Callable[[int], None] | None = None
    keep_every: int = 0
    events: Events = field(default_factory=lambda: Events(None))
    progress: Progress | None = None
    add_up: Callable[[Tensor], None] | None = None

    def run(self, batches: Iterator[Batch], begin: int = 0) -> Course:
        """Train from step ``begin`` on; ``batches`` yields the batch of that step first.

        Raises:
            DivergenceError: a loss is not a finite number; no later checkpoint is written.
            ArgumentError: ``batches`` ends before the last step.
        """
        course = Course(begin)
        losses = Losses(READ_EVERY, self.device, self.add_up)
        progress = self.progress or Progress()
        progress.begin("step", self.schedule.steps, begin)
        kept = begin
        start = time.monotonic()

        def look(asked: bool) -> None:
            found = losses.read(asked)
            if found:
                mean = sum(found) / len(found)
                course.curve.append((course.steps, mean))
                progress.update(len(found) * self.rows_per_step, len(found), f"loss {mean:.4f}")
                rate = self.schedule.rate(course.steps - 1)
                self.events.scalars(course.steps, {"loss": mean, "learning rate": rate})

        try:
            with interruptible() as interruption:
                stop = False
                while course.steps < self.schedule.steps and not stop:
                    batch = next(batches, None)
                    if batch is None:
                        raise ArgumentError(
                            f"the data ended after {course.steps} of {self.schedule.steps} steps; "
                            "ask for fewer steps, or more epochs."
                        )
                    loss = self.step(batch, self.schedule.rate(course.steps))
                    losses.record(course.steps, loss)
                    course.steps += 1
                    due = self.keep_every > 0 and course.steps % self.keep_every == 0
                    if losses.full or due:
                        look(interruption.asked)
                    stop = interruption.asked if self.add_up is None else losses.stop
                    if due and self.keep is not None:
                        self.keep(course.steps)
                        kept = course.steps
                look(False)
                course.interrupted = course.steps < self.schedule.steps
                if self.keep is not None and kept < course.steps:
                    self.keep(course.steps)
        finally:
            progress.end()
        course.seconds = time.monotonic() - start
        return course
