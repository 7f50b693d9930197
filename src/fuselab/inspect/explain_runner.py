"""The child process of ``explain_target``.

    python -m fuselab.inspect.explain_runner explain|warm|sizes|without-gpu FOLDER

FOLDER contains the pickled request. The answer (an ``Explanation``, seconds, rows or an error) is
written there.
"""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fuselab.device.ceiling import Ceilings, measured_again, measured_ceilings
from fuselab.errors import FuselabError, TargetError
from fuselab.inspect import inductor_capture, targets
from fuselab.inspect.assembly.architectures import architecture
from fuselab.inspect.explain import Explanation, Request
from fuselab.inspect.explain_sizes import called_with_sizes, sizes_to_try
from fuselab.inspect.inductor_capture import CompiledGraph, GraphBreak, Launch
from fuselab.inspect.kernel_files import graph_program, kernel_files
from fuselab.inspect.kernel_times import times_of_launches
from fuselab.inspect.profile import Recorder, target_step
from fuselab.inspect.target_prints import muted
from fuselab.inspect.user_code import SourceLine, plain, raising_target_error
from fuselab.measure.machine_state import waiting_share
from fuselab.measure.memory import peak_bytes
from fuselab.measure.statistics import median_interval
from fuselab.measure.steady_step import seconds_of, time_steps
from fuselab.measure.verdict import verdict

STEPS_PROFILED = 5  # at least, and more where a step is short
MOST_STEPS_PROFILED = 50
PROFILED_US = 200_000
TIMING_BUDGET_S = 2.0

Stage = Callable[[str], None]


def explain(request: Request, stage: Stage) -> Explanation:
    """Return all facts about one target except its warm compile time."""
    stage("running the target once")
    target = targets.load(request.target, request.device, request.data)
    with raising_target_error(f"{target.name} raised when it ran:"):
        target_step(target, request.backward)()
    with muted():
        return _explained(target, request, stage)


def _explained(target: targets.Target, request: Request, stage: Stage) -> Explanation:
    stage("tracing with Dynamo")
    with torch.set_grad_enabled(request.backward or not target.is_module):
        count, breaks, dynamo_graphs = inductor_capture.graph_breaks(
            target.callable, *target.args, **target.kwargs
        )
    inductor_capture.forget_compilations()
    stage("compiling with Inductor")
    with inductor_capture.named_kernels(), inductor_capture.capture() as captured:
        compiled = _compiled(target, request)
        step = target_step(compiled, request.backward)
        with raising_target_error(f"{target.name} raised when it ran:"):
            cold_s = seconds_of(step, target.device)
        compilations = inductor_capture.compilations()
        with waiting_share() as waited:
            stage("timing eager and compiled")
            speed = _speed(target, compiled, request.backward)
            stage("timing the kernels")
            steps = _steps_to_profile(speed["compiled"]["us"])
            kernel_us = times_of_launches(step, captured.graphs, steps)
            waited_share = waited()
        kernels = _kernels(captured.graphs, kernel_us, target.device)
        files = _files(captured.graphs, dynamo_graphs, kernel_us)
    facts = {
        "name": target.name,
        "device": target.device.type,
        "mode": request.mode,
        "backward": request.backward,
        "graphs": count,
        "guards": sum(c.guards or 0 for c in compilations),
        "breaks": [_break_row(b) for b in breaks],
        "compile": {
            "cold_s": cold_s,
            "dynamo_s": sum((c.seconds or 0) - (c.backend_seconds or 0) for c in compilations),
            "backend_s": sum(c.backend_seconds or 0 for c in compilations),
        },
        "failures": [c.failure for c in compilations if c.failure],
        "dynamic": request.dynamic,
        "batches": {},
        **speed,
        "waited_share": waited_share,
        "kernels": kernels,
        "ceiling": "cold copy of as many bytes" if any(k["share"] for k in kernels) else None,
    }
    return Explanation(facts, files)


def without_gpu(request: Request, stage: Stage) -> Explanation:
    """Return what Inductor writes for the GPU of ``request.architecture``; nothing is timed."""
    from fuselab.inspect.inductor_without_gpu import pretending

    assert request.architecture is not None
    gpu = architecture(request.architecture)
    stage("running the target once")
    target = targets.load(request.target, request.device, request.data)
    with raising_target_error(f"{target.name} raised when it ran:"):
        target_step(target, request.backward)()
    stage("tracing with Dynamo")
    with torch.set_grad_enabled(request.backward or not target.is_module), muted():
        count, breaks, dynamo_graphs = inductor_capture.graph_breaks(
            target.callable, *target.args, **target.kwargs
        )
    inductor_capture.forget_compilations()
    stage(f"writing code for {gpu.name} with Inductor")
    compiled = replace(target, callable=pretending(target.callable, gpu))
    refused = f"Inductor writes no code of {target.name} for {gpu.name}:"
    with inductor_capture.capture() as captured, raising_target_error(refused), muted():
        target_step(compiled, request.backward)()
    facts = {
        "name": target.name,
        "device": f"cuda:{gpu.name}",
        "chip": gpu.chip,
        "mode": request.mode,
        "backward": request.backward,
        "graphs": count,
        "guards": sum(c.guards or 0 for c in inductor_capture.compilations()),
        "breaks": [_break_row(b) for b in breaks],
        "failures": [c.failure for c in inductor_capture.compilations() if c.failure],
        "dynamic": False,
        "kernels": _kernels(captured.graphs, {}, target.device),
        "ceiling": None,
    }
    return Explanation(facts, _files(captured.graphs, dynamo_graphs, {}))


def warm_seconds(request: Request, stage: Stage) -> float:
    """Return the time in seconds of the first call when the disk cache has every compiled part."""
    target = targets.load(request.target, request.device, request.data)
    stage("compiling with the cache on disk")
    with inductor_capture.named_kernels(), muted():
        step = target_step(_compiled(target, request), request.backward)
        return seconds_of(step, target.device)


def sizes(request: Request, stage: Stage) -> dict[str, Any]:
    """Return what ``called_with_sizes`` finds with sizes as ``request.shapes`` says."""
    assert request.shapes is not None
    target = targets.load(request.target, request.device, request.data)
    mode = None if request.mode == "default" else request.mode
    tried = sizes_to_try(target, request.batches)
    with muted():
        return called_with_sizes(target, request.shapes, mode, request.backward, tried, stage)


def _compiled(target: targets.Target, request: Request) -> targets.Target:
    mode = None if request.mode == "default" else request.mode
    return replace(target, callable=torch.compile(target.callable, mode=mode))


def _speed(eager: targets.Target, compiled: targets.Target, backward: bool) -> dict[str, Any]:
    """Time a step of both by the wall clock, interleaved, as a loop would run it.

    Also measures peak memory and, on a GPU, the share of the time that it is busy.
    """
    device = eager.device
    steps = {
        "eager": target_step(eager, backward),
        "compiled": target_step(compiled, backward),
    }
    timed = time_steps(steps, device, TIMING_BUDGET_S)
    facts: dict[str, Any] = {}
    for name, samples in timed.items():
        times = samples.times_us
        if not times:
            raise TargetError(f"the {name} step could not be timed: {plain(samples.failed)}.")
        _, low, high = median_interval(times)
        facts[name] = {
            "us": median(times),
            "low_us": low,
            "high_us": high,
            "peak_bytes": peak_bytes(steps[name], device),
            "busy_share": _busy_share(steps[name]) if device.type == "cuda" else None,
        }
    found = verdict(timed["compiled"].times_us, timed["eager"].times_us)
    return {**facts, "speedup": found.speedup, "verdict": str(found.outcome)}


def _steps_to_profile(step_us: float) -> int:
    """Return how many steps the kernels are timed in: short ones often, as they scatter more."""
    return max(STEPS_PROFILED, min(MOST_STEPS_PROFILED, round(PROFILED_US / step_us)))


def _busy_share(step: Callable[[], Any]) -> float | None:
    with Recorder((1, 1, STEPS_PROFILED, 1), "step") as recorder:
        for _ in range(STEPS_PROFILED + 2):
            step()
            recorder.step()
    return recorder.result.tables.busy_share


def _kernels(
    graphs: Sequence[CompiledGraph],
    kernel_us: dict[tuple[int, int], float],
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return one row per launch, in launch order."""
    ceilings = measured_ceilings(device) if kernel_us else None
    rows = []
    for position, graph in enumerate(graphs):
        for order, launch in enumerate(graph.launches):
            us = kernel_us.get((position, order))
            moved = _bytes_moved(launch)
            gbps = moved / us / 1e3 if us and moved else None
            limit = None
            if ceilings is not None and moved is not None and launch.kind == "fused":
                limit = _ceiling_gbps(ceilings, device, moved, gbps)
            rows.append(
                {
                    "graph": graph.index,
                    "phase": graph.phase,
                    "name": launch.name,
                    "kind": launch.kind,
                    "operators": list(launch.operators),
                    "lines": [_line_row(line) for line in launch.lines],
                    "bytes": moved,
                    "us": us,
                    "gbps": gbps if launch.kind == "fused" else None,
                    "ceiling_gbps": limit,
                    "share": gbps / limit if gbps and limit else None,
                }
            )
    return rows


def _bytes_moved(launch: Launch) -> int | None:
    if launch.bytes_read is None or launch.bytes_written is None:
        return None
    return launch.bytes_read + launch.bytes_written


def _ceiling_gbps(
    ceilings: Ceilings, device: torch.device, moved: int, gbps: float | None
) -> float | None:
    """Return the bandwidth of the measured copy nearest in size.

    It is measured again if ``gbps`` exceeds it. Below half the smallest copy the result is None,
    because such a kernel's time is its launch.
    """
    if moved < min(map(int, ceilings.copy_gbps)) / 2:
        return None
    size = ceilings.nearest_copy(moved)
    if gbps is not None and gbps > ceilings.copy_gbps[size]:
        ceilings = measured_again(ceilings, device, "copy_gbps", size)
    return ceilings.copy_gbps[size]


def _break_row(found: GraphBreak) -> dict[str, Any]:
    return {"reason": found.reason, **(_line_row(found.line) if found.line else {})}


def _line_row(line: SourceLine) -> dict[str, Any]:
    return {"line": plain(line), "file": line.file, "line_number": line.line, "source": line.text}


# What the text of a graph refers to.
_IMPORTS = "import torch\nfrom torch import device, inf, nan  # noqa: F401\n\n\n"


def _files(
    graphs: Sequence[CompiledGraph],
    dynamo_graphs: Sequence[str],
    kernel_us: dict[tuple[int, int], float],
) -> dict[str, str]:
    files = {f"dynamo_graph_{i}.py": f"{_IMPORTS}{text}" for i, text in enumerate(dynamo_graphs)}
    for graph in graphs:
        name = f"graph_{graph.index}_{graph.phase}"
        files[f"{name}.py"] = graph.code
        if graph.module is not None:
            files[f"{name}.fx.py"] = graph_program(graph)
            files[f"{name}.before_fusion.txt"] = graph.ir_before_fusion
            files[f"{name}.after_fusion.txt"] = graph.ir_after_fusion
    return files | kernel_files(graphs, kernel_us)


ANSWERS: dict[str, Callable[[Request, Stage], Any]] = {
    "explain": explain,
    "warm": warm_seconds,
    "sizes": sizes,
    "without-gpu": without_gpu,
}


def main(what: str, folder: Path) -> None:
    request: Request = pickle.loads((folder / "request").read_bytes())

    def stage(words: str) -> None:
        (folder / "stage").write_text(words)

    outcome: Any
    try:
        outcome = ANSWERS[what](request, stage)
    except FuselabError as error:
        outcome = error.with_traceback(None)
        outcome.__cause__ = outcome.__context__ = None
    (folder / f"{what}-answer").write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
