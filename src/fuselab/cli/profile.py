"""``fuselab profile``: how the time and memory of a TARGET, or of a script, are spent."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselab.cli.options import FILE, FOLDER, Device, Json, TargetData, flag, option

if TYPE_CHECKING:
    from fuselab.inspect.profile import Profile
    from fuselab.inspect.targets import Target


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        "profile", context_settings={"allow_extra_args": True, "ignore_unknown_options": False}
    )(profile)


def profile(
    context: typer.Context,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET | TRACE.json | -- python script.py ARGS",
            help="file.py, file.py:name, package.module:name, a built-in model; a trace; a script.",
        ),
    ],
    data: TargetData = None,
    backward: Annotated[bool, flag("--backward", "Profile loss and backward too.")] = False,
    schedule: Annotated[
        str | None, option("Steps: wait, warm-up, active, repeat.", "W,W,A,R")
    ] = None,
    ncu: Annotated[
        str | None, option("GPU: the counters of the kernels whose name matches.", "KERNEL")
    ] = None,
    ncu_report: Annotated[
        Path | None,
        option("Where --ncu keeps its report.", "FILE", "--ncu-report", click_type=FILE),
    ] = None,
    tries: Annotated[
        bool, flag("--try", "Time the larger levers: autocast, torch.compile, and others.")
    ] = False,
    blocking: Annotated[
        bool, flag("--blocking", "GPU: every launch waits, so that time falls on its cause.")
    ] = False,
    trace: Annotated[
        Path | None, option("Write a Chrome (Perfetto) trace.", "FILE", click_type=FILE)
    ] = None,
    tensorboard: Annotated[
        Path | None, option("Write for TensorBoard's profiler.", "DIR", click_type=FOLDER)
    ] = None,
    plot: Annotated[
        Path | None, option("Draw split and memory (.png, .svg, .pdf).", "FILE", click_type=FILE)
    ] = None,
    within: Annotated[
        str | None, option("Tables and findings of one named range only.", "RANGE")
    ] = None,
    against: Annotated[
        str | None, option("An earlier --json FILE, or another TARGET to time in turn.", "F|TARGET")
    ] = None,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Show where the time goes: split, findings, tables, memory.

    A script is started behind two dashes: fuselab profile -- python train.py --epochs 1. Its
    optimizer steps are the steps; a script without an optimizer is one step as a whole. A trace
    that torch.profiler exported elsewhere (.json, .json.gz) gives the same tables.
    """
    # torch reads this on import; its profiler warns of memory allocated before it started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA starts, which happens below

    from fuselab.device.select import select
    from fuselab.errors import ArgumentError
    from fuselab.inspect.compare import compare
    from fuselab.inspect.trace_file import SUFFIXES
    from fuselab.report.compare_text import compare_text
    from fuselab.report.ncu_text import ncu_text
    from fuselab.report.plots import check_plot
    from fuselab.report.profile_text import profile_text
    from fuselab.report.result import result, write_result

    if plot is not None:
        check_plot(plot)
    before = _before(against)
    chosen = select(device)
    if blocking and chosen.type != "cuda":
        raise ArgumentError("--blocking is for a GPU: on a CPU every operator waits already.")
    if ncu is not None:
        _check_ncu(chosen, ncu)
    is_script, is_trace = _is_python(target), target.endswith(SUFFIXES)
    if context.args and not is_script:
        raise ArgumentError(
            f"unexpected '{context.args[0]}' behind the TARGET; a script is started as "
            "'fuselab profile -- python script.py'."
        )
    if (is_script or is_trace) and (data is not None or backward):
        kind = "a script" if is_script else "a trace"
        raise ArgumentError(f"--data and --backward belong to a TARGET; {kind} has its own.")
    if (is_script or is_trace) and (tries or ncu is not None):
        verb = "--try" if tries else "--ncu"
        raise ArgumentError(f"{verb} runs a TARGET again; a script or a trace is none.")
    if (is_script or is_trace) and against is not None and before is None:
        raise ArgumentError(
            "--against TARGET needs a TARGET to time in turn; give an earlier --json FILE."
        )
    facts: dict[str, Any] = {"blocking": blocking}
    if is_trace:
        if schedule is not None or blocking:
            raise ArgumentError("--schedule and --blocking record a run; a trace is recorded.")
        from fuselab.inspect.trace_file import profile_trace

        profiled = profile_trace(target, within=within)
        facts |= {"trace": target}
    elif is_script:
        profiled = _script(context.args, schedule, within)
        facts |= {"script": context.args[0], "arguments": context.args[1:]}
    else:
        profiled, walls, before_facts = _targets(
            target, against if before is None else None, chosen, data, backward, schedule, within
        )
        facts |= {"target": target, "data": data, "backward": backward, **walls}
        before = before or before_facts
        if tries:
            facts["tried"] = _tried(target, chosen, data, backward)
    facts |= profiled.describe()
    report = (ncu_report or Path("fuselab.ncu-rep")).with_suffix(".ncu-rep")
    if ncu is not None:
        facts["ncu"] = _counters(target, chosen, data, backward, ncu, report, facts["kernels"])
    if before is not None:
        now = result("profile", facts, chosen)
        facts["against"] = compare(before, now, interleaved=before.get("in_turn", False))
    if trace is not None:
        profiled.save_trace(trace)
    if tensorboard is not None:
        profiled.save_tensorboard(tensorboard)
    if plot is not None:
        from fuselab.report import files
        from fuselab.report.profile_plot import profile_plot

        with files.replacing(plot) as temporary:
            profile_plot(facts, temporary)
    write_result(json, "profile", facts, chosen)
    print(profile_text(facts))
    if ncu is not None:
        print(ncu_text(facts["ncu"], str(report)))
    if before is not None:
        print()
        print(compare_text(facts["against"], str(against)))


def _check_ncu(device: Any, kernel: str) -> None:
    """Refuse ``--ncu`` before the work: without a GPU or ncu, or with no regular expression."""
    import re

    import torch

    from fuselab.device.select import why_no_cuda
    from fuselab.errors import ArgumentError, DeviceError
    from fuselab.inspect.ncu import path_of_ncu

    if device.type != "cuda":
        why = "--device cpu was asked for" if torch.cuda.is_available() else why_no_cuda()
        raise DeviceError(f"--ncu reads the counters of an NVIDIA GPU, and there is none: {why}.")
    try:
        re.compile(kernel)
    except re.error as error:
        raise ArgumentError(f"--ncu '{kernel}' is no regular expression: {error}.") from error
    path_of_ncu()


def _counters(
    target: str,
    device: Any,
    data: str | None,
    backward: bool,
    kernel: str,
    report: Path,
    rows: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return the counters of the kernels, each beside the bytes of its operator's operands."""
    from dataclasses import asdict

    from fuselab.inspect import targets
    from fuselab.inspect.ncu import profile_kernel
    from fuselab.inspect.profile import significant_everywhere
    from fuselab.report.progress import say

    say("fuselab: running it under Nsight Compute ...")
    found = profile_kernel(targets.load(target, device, data), kernel, report, backward=backward)
    least = {row["name"]: row["least_bytes"] / row["calls"] for row in rows if row["calls"]}
    return [
        significant_everywhere({**asdict(one), "least_bytes": least.get(one.name)}) for one in found
    ]


def _before(against: str | None) -> dict[str, Any] | None:
    """Return the earlier result that ``--against`` names; None if it names a TARGET or nothing."""
    from fuselab.report.result import read_result

    is_result = against is not None and against.endswith(".json")
    return read_result(against, "profile") if against is not None and is_result else None


def _targets(
    target: str,
    other: str | None,
    device: Any,
    data: str | None,
    backward: bool,
    schedule: str | None,
    within: str | None,
) -> tuple[Profile, dict[str, Any], dict[str, Any] | None]:
    """Profile a TARGET and time it without the profiler, in turn with ``other`` if there is one.

    Returns the profile, the facts of its wall time, and the facts of the other.
    """
    from dataclasses import asdict

    from fuselab.inspect import targets
    from fuselab.inspect.profile import parse_schedule, profile_target, significant_everywhere
    from fuselab.inspect.wall_time import wall_times
    from fuselab.report.result import result

    steps = {} if schedule is None else {"schedule": parse_schedule(schedule)}
    found = {"now": targets.load(target, device, data)}
    if other is not None:
        found["before"] = targets.load(other, device, data)
    profiles = {
        name: profile_target(each, backward=backward, within=within, **steps)
        for name, each in found.items()
    }
    walls = {
        name: {
            "wall": significant_everywhere(asdict(wall)),
            "arguments": _tensors_of(found[name]),
        }
        for name, wall in wall_times(found, backward=backward).items()
    }
    before = None
    if other is not None:
        before = {**profiles["before"].describe(), **walls["before"], "in_turn": True}
        before = result("profile", before, device)
    return profiles["now"], walls["now"], before


def _tensors_of(target: Target) -> list[str]:
    """Return the size and dtype of every tensor that the target is called with, in its order."""
    from torch import Tensor

    from fuselab import structures
    from fuselab.op import dtype_name

    return [
        f"{'x'.join(map(str, leaf.shape)) or '0-d'} {dtype_name(leaf.dtype)}"
        for _, leaf in structures.named([*target.args, *target.kwargs.values()], "")
        if isinstance(leaf, Tensor)
    ]


def _tried(target: str, device: Any, data: str | None, backward: bool) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from fuselab.inspect import targets
    from fuselab.inspect.profile import significant_everywhere
    from fuselab.inspect.target_prints import muted
    from fuselab.inspect.trials import try_levers
    from fuselab.report.progress import say

    with muted():
        rows = try_levers(
            targets.load(target, device, data),
            backward=backward,
            progress=lambda words: say(f"fuselab: {words} ..."),
        )
    return [significant_everywhere(asdict(row)) for row in rows]


def _is_python(target: str) -> bool:
    """Return whether a TARGET is the Python that runs fuselab. Raises ArgumentError for another."""
    from fuselab.errors import ArgumentError

    path = Path(target)
    if not re.fullmatch(r"python(3(\.\d+)?)?", path.name) or path.is_dir():
        return False
    ours = Path(sys.executable)
    if path.name == target:
        same = target in ("python", "python3", f"python3.{sys.version_info.minor}")
    else:
        same = path.parent.resolve() == ours.parent.resolve()
    if not same:
        raise ArgumentError(
            f"{target} is another Python than fuselab's, which runs the script: write 'python' for "
            f"{ours}, or install fuselab for the other."
        )
    return True


def _script(command: list[str], schedule: str | None, within: str | None) -> Profile:
    from fuselab.errors import ArgumentError
    from fuselab.inspect.profile import parse_schedule
    from fuselab.inspect.script import profile_script

    named = command[1:] if command[:1] == ["-m"] else command
    if not named or named[0].startswith("-"):
        raise ArgumentError(
            "name the script: fuselab profile -- python script.py ARGS, or python -m module ARGS."
        )
    steps = {} if schedule is None else {"schedule": parse_schedule(schedule)}
    return profile_script(command[0], command[1:], within=within, **steps)
