"""Several candidates timed in one run, in shuffled rounds, so that drift affects all of them
alike."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter

import torch

from fuselab.errors import summary
from fuselab.measure.cpu_timer import without_garbage_collection
from fuselab.measure.device_timer import timer
from fuselab.measure.host import HostTimer
from fuselab.measure.timer import Call, Timer
from fuselab.measure.verdict import LOOKS

FEWEST_ROUNDS = 6  # the fewest whose range covers the median with 95 % confidence


@dataclass(frozen=True)
class Candidate:
    """One of several callables to time.

    ``verify(after)`` is called with False before the timing and with True after it, and returns
    None, or in a few words why the candidate's result is wrong. It should poison free memory first,
    so that an unwritten output shows. A wrong candidate has no samples.
    """

    name: str
    call: Call
    verify: Callable[[bool], str | None] = lambda after: None


@dataclass
class Samples:
    """One candidate's samples: microseconds per call, one per round, with the rounds in the same
    order for all candidates.

    If there are none, ``wrong`` says what is wrong with its result, or ``failed`` what it raised.
    """

    times_us: list[float] = field(default_factory=list)
    calls_per_sample: int = 0
    method: str = ""
    page_faults_per_call: float | None = None
    wrong: str | None = None
    failed: str | None = None


Decided = Callable[[Mapping[str, Sequence[float]]], bool]


def interleave(
    candidates: Sequence[Candidate],
    device: torch.device,
    *,
    cold: bool = True,
    graph: bool = False,
    host: bool = False,
    budget_s: float = 2.0,
    seed: int = 0,
    fewest: int = FEWEST_ROUNDS,
    decided: Decided = lambda times: False,
) -> dict[str, Samples]:
    """Time every candidate once per round, in shuffled order (``seed``), after warming all of them.

    The device's time is measured as ``timer`` does it (``cold``, ``graph``), or with ``host`` the
    host's own time.

    ``decided(times)`` is called only at the round counts of ``verdict.LOOKS``. Rounds continue
    until it returns True, about ``budget_s`` seconds are spent (at least ``fewest`` rounds are
    taken), or the last count is reached.
    """
    results = {candidate.name: Samples() for candidate in candidates}
    timers: dict[str, Timer] = {}

    def clock(call: Call) -> Timer:
        if host:
            return HostTimer(call, device)
        return timer(call, device, cold=cold, graph=graph)

    for candidate in candidates:
        ready = _ready(candidate, clock, results[candidate.name])
        if ready is not None:
            timers[candidate.name] = ready
    times = {name: results[name].times_us for name in timers}
    order = list(timers)
    shuffle = random.Random(seed).shuffle
    deadline = perf_counter() + budget_s
    with without_garbage_collection():
        for done in range(LOOKS[-1] if timers else 0):
            if done >= fewest and perf_counter() > deadline:
                break
            if done in LOOKS and decided(times):
                break
            shuffle(order)
            for name in order:
                times[name].append(timers[name].sample())
    for candidate in candidates:
        if candidate.name in timers:
            _finish(candidate, timers[candidate.name], results[candidate.name])
    return results


def _ready(candidate: Candidate, clock: Callable[[Call], Timer], result: Samples) -> Timer | None:
    """Return a warm timer for a candidate that runs and is right; otherwise None, with the reason
    in ``result``."""
    try:
        result.wrong = candidate.verify(False)
        return None if result.wrong else clock(candidate.call)
    except Exception as error:  # a candidate may raise anything; the others are still timed
        result.failed = summary(error)
        return None


def _finish(candidate: Candidate, clock: Timer, result: Samples) -> None:
    result.calls_per_sample, result.method = clock.calls, clock.method
    result.page_faults_per_call = clock.page_faults_per_call
    try:
        result.wrong = candidate.verify(True)
    except Exception as error:
        result.failed = summary(error)
    if result.wrong or result.failed:
        result.times_us.clear()
