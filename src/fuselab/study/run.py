"""``study``: profile, fuse, time, explain, check and bench one target, in that order, as facts."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fuselab import structures
from fuselab.device import environment
from fuselab.ejection.folder import copy_package
from fuselab.fusion.fuse import fuse_with_report
from fuselab.fusion.result import Decision, FuseResult, Replacement
from fuselab.inspect import targets
from fuselab.inspect.profile import profile_target
from fuselab.inspect.target_prints import muted
from fuselab.inspect.targets import Target
from fuselab.inspect.user_code import plain
from fuselab.measure.machine_state import waiting_share
from fuselab.measure.statistics import significant
from fuselab.study.compiler import compiler_of
from fuselab.study.conclude import conclude
from fuselab.study.facts import Argument, Replaced, Study, Subject
from fuselab.study.leads import leads_of, short_line
from fuselab.study.limit import limit_of, stands
from fuselab.study.operators import bench_found, check_found, found_in
from fuselab.study.ways import against, parameters_of, step_of, time_ways

WAYS_BUDGET_S = 12.0
FUSE_BUDGET_S = 1.0
BENCH_BUDGET_S = 1.5
# fewer with backward, because each is timed in three phases
BENCH_SIZES, BENCH_SIZES_BACKWARD = 4, 2
QUICKER = 0.25  # the share of every budget that --quick uses

Progress = Callable[[str], None]


@muted()  # explain runs the target in a process of its own, where its first step is heard
def study(
    spec: str,
    *,
    data: str | None = None,
    device: torch.device | str = "cpu",
    backward: bool = False,
    quick: bool = False,
    kernels: Path | None = None,
    progress: Progress = lambda text: None,
) -> Study:
    """Study a TARGET: what is slow, how much faster a fused operator or torch.compile makes it, how
    far the fastest way is from the device's limit, and the proof.

    ``data`` is passed to the file's ``get_inputs(data=...)``. ``backward`` studies forward and
    backward, otherwise the forward without gradients, in evaluation mode. ``quick`` times for a
    quarter as long. ``kernels`` is a folder beside the report for copies of the kernel packages
    that were written for the target and kept. ``progress`` is called with a line before each step.
    On the CPU, allocation biases timings unless it was pinned (``fuselab.measure.fresh``); the
    command line pins it.

    Raises TargetError, DeviceError, DataError, OutputError, or any other error of loading the
    target.
    """
    start = perf_counter()
    scale = QUICKER if quick else 1.0
    target = targets.load(spec, device, data)
    if isinstance(target.callable, nn.Module):
        target.callable.train(backward)
    progress("profile")
    profiled = profile_target(target, backward=backward).describe()
    eager = step_of(target, target.callable, backward)
    progress("limit of the device")
    limit = limit_of(eager, target.args, parameters_of(target), target.device, backward)
    progress("fuse: every chain that an operator or a generated kernel could replace")
    fused = fuse_with_report(
        target.callable,
        target.args,
        target.kwargs,
        budget_s=FUSE_BUDGET_S * scale,
        progress=progress,
    )
    rows = _replaced_rows(fused.replacements, kernels)
    with waiting_share() as waited:
        ways = time_ways(
            target,
            fused.model if fused.kept else None,
            backward=backward,
            budget_s=WAYS_BUDGET_S * scale,
            progress=progress,
        )
        waited_share = significant(waited())
    progress("explain: what torch.compile makes of it")
    compiler = compiler_of(target, backward, progress)
    if limit is not None:
        times = [way.us for way in ways if way.us is not None]
        limit = stands(limit, min(times, default=limit.us), target.device)
        ways = against(ways, limit)
    found = found_in(fused.replacements, BENCH_SIZES_BACKWARD if backward else BENCH_SIZES)
    progress("check and bench the operators at the sizes found")
    done = Study(
        subject=_subject(target, data, backward),
        environment=environment.describe(target.device),
        ways=ways,
        limit=limit,
        profile=_profile_facts(profiled),
        leads=leads_of(profiled["findings"], rows, compiler.kernels),
        compiler=compiler,
        replaced=rows,
        left=tuple(_left(fused)),
        proof=f"{fused.proof[:1].upper()}{fused.proof[1:]}.",
        checks=check_found(found, target.device, progress),
        benches=bench_found(
            found,
            target.device,
            backward=backward,
            budget_s=BENCH_BUDGET_S * scale,
            progress=progress,
        ),
        seconds=significant(perf_counter() - start),
        waited_share=waited_share,
    )
    return replace(done, headline=conclude(done))


def _replaced_rows(
    replacements: Sequence[Replacement], kernels: Path | None = None
) -> tuple[Replaced, ...]:
    """Return the rows kept, then those measured, then those refused; each once. The packages of
    those kept are copied to the folder ``kernels``.

    A chain that was refused with its operands in one order and measured in the other counts as
    tried.
    """
    order = list(Decision)
    ordered = sorted(replacements, key=lambda row: order.index(row.decision))
    rows = dict.fromkeys(_replaced(row, kernels) for row in ordered)
    tried = {(row.module, row.line, row.chain) for row in rows if row.before_us is not None}
    return tuple(
        row
        for row in rows
        if row.before_us is not None or (row.module, row.line, row.chain) not in tried
    )


def _replaced(row: Replacement, kernels: Path | None) -> Replaced:
    package = None
    if kernels is not None and row.folder is not None and row.decision is Decision.KEPT:
        copy_package(row.folder, kernels / row.folder.name)
        package = f"{kernels.name}/{row.folder.name}"
    return Replaced(
        operator=row.op.short_name,
        module=plain(row.module),
        chain=plain(row.chain),
        line=plain(short_line(row.source)),
        lines=tuple(plain(short_line(line)) for line in row.lines),
        decision=str(row.decision),
        reason=plain(row.reason),
        implementation=row.implementation,
        before_us=None if row.before_us is None else significant(row.before_us),
        after_us=None if row.after_us is None else significant(row.after_us),
        speedup=None if row.verdict is None else significant(row.verdict.speedup),
        package=package,
    )


def _left(fused: FuseResult) -> Sequence[str]:
    return [f"{plain(row.module) or 'the model'}: {plain(row.reason)}" for row in fused.left]


def _subject(target: Target, data: str | None, backward: bool) -> Subject:
    tensors = [(name, value) for name, value in _named(target) if isinstance(value, Tensor)]
    return Subject(
        name=target.name,
        spec=target.spec,
        file=target.file,
        data=data,
        phase="forward and backward" if backward else "forward",
        parameters=sum(value.numel() for value in parameters_of(target)),
        arguments=tuple(
            Argument(
                name,
                ", ".join(map(str, value.shape)),
                str(value.dtype).removeprefix("torch."),
            )
            for name, value in tensors
        ),
    )


def _named(target: Target) -> list[tuple[str, Any]]:
    """Return every leaf of the arguments, named by its parameter and its place in it: x,
    boxes[0]."""
    called = target.callable.forward if isinstance(target.callable, nn.Module) else target.callable
    try:
        bound = inspect.signature(called).bind(*target.args, **target.kwargs).arguments
    except (TypeError, ValueError):  # the callable has no signature
        bound = {"args": target.args, **target.kwargs}
    return [
        leaf for parameter, value in bound.items() for leaf in structures.named(value, parameter)
    ]


def _profile_facts(profiled: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a profile that the report shows; ``fuselab profile`` shows all of it."""
    on_gpu = profiled["device"].startswith("cuda")
    time = "device_us" if on_gpu else "cpu_us"
    self_time = "self_device_us" if on_gpu else "self_cpu_us"
    return {
        **{key: profiled[key] for key in ("name", "device", "steps", "step_us", "split", "memory")},
        "lines": [
            {key: row[key] for key in ("name", "text", "calls", "share")} | {"us": row[time]}
            for row in profiled["lines"]
        ],
        "operators": [
            {key: row[key] for key in ("name", "shapes", "calls", "share")} | {"us": row[self_time]}
            for row in profiled["operators"]
        ],
    }
