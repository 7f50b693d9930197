"""The whole target each way, in one interleaved run: eager, fused, compiled, fused and compiled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.inspect.targets import Target
from fuselab.inspect.user_code import plain
from fuselab.measure.interleave import Samples
from fuselab.measure.memory import peak_bytes
from fuselab.measure.statistics import median_interval, significant
from fuselab.measure.steady_step import seconds_of, step, time_steps
from fuselab.measure.verdict import Outcome, verdict
from fuselab.study.facts import Limit, Way

TITLES = {
    "eager": "eager",
    "fused": "fuselab.fuse",
    "compiled": "torch.compile",
    "compiled_fused": "torch.compile of fused",
}
_SAME_AS = {"fused": "eager", "compiled_fused": "compiled"}


@dataclass(frozen=True)
class _Ready:
    """A way whose first call was made; ``prepare_s`` is that call's time in seconds."""

    call: Callable[[], Any]
    prepare_s: float


def time_ways(
    target: Target,
    fused: Callable[..., Any] | None,
    *,
    backward: bool,
    budget_s: float,
    progress: Callable[[str], None],
) -> tuple[Way, ...]:
    """Time the four ways and return them in the order of ``TITLES``, without shares of a limit.

    ``fused`` is None if nothing was replaced. A way that raises, torch.compile for example, has the
    reason in place of times.
    """
    functions = {"eager": target.callable, "compiled": torch.compile(target.callable)}
    if fused is not None:
        functions |= {"fused": fused, "compiled_fused": torch.compile(fused)}
    ways = {name: Way(name, title) for name, title in TITLES.items()}
    ready: dict[str, _Ready] = {}
    torch._dynamo.reset()
    for name, function in functions.items():
        progress(f"{TITLES[name]}: first call")
        made = _prepare(function, target, backward)
        if isinstance(made, _Ready):
            ready[name] = made
        else:
            ways[name] = replace(ways[name], reason=made)
    progress(f"timing {len(ready)} ways, interleaved")
    steps = {name: made.call for name, made in ready.items()}
    timed = time_steps(steps, target.device, budget_s, _decided)
    for name, made in ready.items():
        ways[name] = _way(ways[name], made, timed, target.device)
    if fused is None:
        for name, same in _SAME_AS.items():
            reason = f"nothing was replaced, so this is {TITLES[same]}"
            ways[name] = replace(ways[name], same_as=same, reason=reason)
    return tuple(ways.values())


def against(ways: Sequence[Way], limit: Limit) -> tuple[Way, ...]:
    """Return the ways with their shares of ``limit``."""
    return tuple(
        way if way.us is None else replace(way, limit_share=significant(limit.us / way.us))
        for way in ways
    )


def step_of(target: Target, function: Callable[..., Any], backward: bool) -> Callable[[], Any]:
    """Return a call that runs one step of ``function`` on the target's inputs and parameters."""
    return step(function, target.args, target.kwargs, parameters_of(target), backward=backward)


def parameters_of(target: Target) -> list[Tensor]:
    """Return the module's parameters; a function has none."""
    return list(target.callable.parameters()) if isinstance(target.callable, nn.Module) else []


def _prepare(function: Callable[..., Any], target: Target, backward: bool) -> _Ready | str:
    call = step_of(target, function, backward)
    try:
        return _Ready(call, seconds_of(call, target.device))
    # torch.compile raises many kinds of errors for code that it does not take
    except Exception as error:
        return plain(f"{type(error).__name__}: {error}", 160).rstrip(".")


def _decided(times: Mapping[str, Sequence[float]]) -> bool:
    return all(
        verdict(times[name], times["eager"]).outcome is not Outcome.UNCLEAR
        for name in times
        if name != "eager"
    )


def _way(
    way: Way,
    made: _Ready,
    timed: dict[str, Samples],
    device: torch.device,
) -> Way:
    samples = timed[way.name]
    if not samples.times_us:
        return replace(way, reason=plain(samples.failed or samples.wrong, 160))
    times = samples.times_us
    _, low, high = median_interval(times)
    found = verdict(times, timed["eager"].times_us)
    us = significant(median(times))
    return replace(
        way,
        us=us,
        low_us=significant(low),
        high_us=significant(high),
        # of the medians, so that times and speed-ups order alike; the verdict pairs the rounds
        speedup=significant(median(timed["eager"].times_us) / median(times)),
        outcome=None if way.name == "eager" else str(found.outcome),
        peak_bytes=peak_bytes(made.call, device),
        prepare_s=significant(made.prepare_s),
    )
