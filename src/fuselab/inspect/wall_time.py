"""The time of a TARGET's step by the wall clock, without the profiler, in interleaved rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from fuselab.errors import TargetError
from fuselab.inspect.profile import target_step
from fuselab.inspect.target_prints import muted
from fuselab.inspect.targets import Target
from fuselab.inspect.user_code import plain
from fuselab.measure.machine_state import MachineState, machine_state, waiting_share
from fuselab.measure.statistics import median_interval
from fuselab.measure.steady_step import time_steps

BUDGET_S = 1.0


@dataclass(frozen=True)
class WallTime:
    """Microseconds of one step: the median of the rounds and its 95 % interval."""

    us: float
    low_us: float
    high_us: float
    rounds_us: tuple[float, ...]
    machine: MachineState


def wall_times(
    found: Mapping[str, Target], *, backward: bool, budget_s: float = BUDGET_S
) -> dict[str, WallTime]:
    """Time one step of each TARGET as a loop runs it, all in the same rounds.

    The step is that of ``profile_target``. ``budget_s`` ends the rounds, but not before a verdict
    has as many as it needs. All targets are on one device. Raises TargetError if a step fails.
    """
    device = next(iter(found.values())).device
    steps = {name: target_step(target, backward) for name, target in found.items()}
    with muted(), waiting_share() as waited:
        timed = time_steps(steps, device, budget_s)
        machine = machine_state(device, waited())
    times = {}
    for name, samples in timed.items():
        if not samples.times_us:
            raise TargetError(
                f"the step of {found[name].name} could not be timed: {plain(samples.failed)}."
            )
        _, low, high = median_interval(samples.times_us)
        times[name] = WallTime(
            median(samples.times_us), low, high, tuple(samples.times_us), machine
        )
    return times
