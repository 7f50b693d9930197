"""A finding on the optimizer: many kernels where one would read every parameter once."""

from __future__ import annotations

import re
from collections.abc import Iterator

from fuselab.inspect.chains import Call
from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import Search
from fuselab.inspect.kineto import Storage
from fuselab.inspect.work_kinds import DISPATCH_BYTES

FEWEST_CALLS = 8  # operators in the optimizer's step
SMALLEST_SHARE = 0.02  # the least share of the step that one kernel would save

_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")  # torch.optim takes fused=True for these


def many_small_kernels(search: Search) -> Iterator[Finding]:
    """Find an optimizer that walks its parameters operator by operator.

    One kernel reads every gradient, parameter and state once and writes what changed. The saving is
    the operators' time without the time of that traffic, at the best rate that one of the large
    operators reaches here.
    """
    calls = [
        call
        for call in search.calls
        if not call.op.backward and any(_STEP.fullmatch(name) for name in call.op.ranges)
    ]
    if len(calls) < FEWEST_CALLS or any("_fused_" in call.op.name for call in calls):
        return
    spent = sum(search.cost.get(id(call.op), 0.0) for call in calls)
    saved = spent - _one_pass_us(search, calls)
    if saved < SMALLEST_SHARE * search.split.step_us:
        return
    name = next(found[1] for call in calls for r in call.op.ranges if (found := _STEP.fullmatch(r)))
    advice = (
        f"{name}(..., fused=True): one kernel updates many parameters."
        if name in _FUSED
        else "torch.compile the optimizer's step, or give it foreach=True: one kernel for many "
        "parameters."
    )
    yield search.finding(
        "many small optimizer kernels",
        f"{name} runs {len(calls)} operators one after the other, and each reads again what the "
        "one before wrote",
        advice,
        next((call.op.line for call in calls if call.op.line is not None), None),
        saved,
        float(len(calls)),
        operators=tuple(dict.fromkeys(call.op.name for call in calls)),
    )


def _one_pass_us(search: Search, calls: list[Call]) -> float:
    """Return the time of one kernel that reads and writes each lasting tensor once."""
    inputs: dict[Storage, int] = {}
    made = {storage for call in calls for storage in call.writes if storage not in call.reads}
    written: dict[Storage, int] = {}
    for call in calls:
        for storage, size in call.reads.items():
            if storage not in made:
                inputs[storage] = max(size, inputs.get(storage, 0))
        for storage, size in call.writes.items():
            if storage in inputs:
                written[storage] = max(size, written.get(storage, 0))
    traffic = sum(inputs.values()) + sum(written.values())
    rates = [
        call.bytes / us
        for call in calls
        if call.bytes > DISPATCH_BYTES and (us := search.cost.get(id(call.op), 0.0)) > 0
    ]
    if not rates:  # every operator costs its dispatch, and one kernel costs one
        return sum(search.cost.get(id(call.op), 0.0) for call in calls) / len(calls)
    return traffic / max(rates)
