"""The judge's clock: calls in another process, timed from outside of it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from torch import Tensor

from fuselab.prove import asked_timing
from fuselab.prove.arguments import copy_of_storage, mapped
from fuselab.prove.asked_timing import Change
from fuselab.prove.processes import Process


@dataclass
class Clock:
    """The times of one process's calls, and what taking its outputs costs.

    A question without a call is timed beside every one with calls, and subtracted.
    """

    process: Process
    call_s: list[float] = field(default_factory=list)
    late_s: list[float] = field(default_factory=list)  # how much longer the first taking takes

    def ask(self, change: Change, count: int = 1) -> float:
        """Return the seconds that ``count`` calls take more than a question without a call."""
        empty, _ = timed(lambda: self.process.ask(asked_timing.no_calls, count, change.plain))
        whole, _ = timed(lambda: self.process.ask(asked_timing.calls, count, change.plain))
        return whole - empty

    def call(self, change: Change) -> None:
        """Time one call."""
        self.call_s.append(max(self.ask(change), 1e-7))

    def taken(self) -> list[Any]:
        """Take the outputs of the last call, twice, and keep by how much the first time is
        longer."""
        first, found = timed(lambda: self.process.ask(asked_timing.last_output))
        second, _ = timed(lambda: self.process.ask(asked_timing.last_output))
        self.late_s.append(first - second)
        results: list[Any] = found
        return results

    @property
    def late(self) -> float:
        """The seconds by which outputs come later than the call said, over all that were taken."""
        return max(0.0, median(self.late_s)) if self.late_s else 0.0

    @property
    def times_us(self) -> list[float]:
        return [(one + self.late) * 1e6 for one in self.call_s]


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds that ``work`` takes, and what it returns."""
    begin = time.perf_counter()
    found = work()
    return time.perf_counter() - begin, found


def own_copies(args: Sequence[Any]) -> list[Any]:
    """Return the arguments with tensors copied, so that the judge can change them too."""
    return mapped(lambda one: copy_of_storage(one) if isinstance(one, Tensor) else one, list(args))


def drawn_change(args: Sequence[Any], chance: random.Random) -> Change:
    """Return a change of one element: the numbers are those of two elements of the same argument,
    so that the inputs stay valid."""
    places = [
        place
        for place, one in enumerate(args)
        if isinstance(one, Tensor)
        and one.is_floating_point()
        and one.is_contiguous()
        and one.numel()
    ]
    if not places:
        return Change()
    place = chance.choice(places)
    flat = args[place].detach().view(-1)
    first, second, index = (chance.randrange(flat.numel()) for _ in range(3))
    return Change(place, index, (float(flat[first]), float(flat[second])))
