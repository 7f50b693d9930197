"""``fuselab profile``: how the time and memory of a TARGET, or of a script, are spent."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselab.cli.options import FILE, FOLDER, Device, Json, TargetData, flag, option

if TYPE_CHECKING:
    from fuselab.inspect.profile import Profile


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
            metavar="TARGET | -- python script.py ARGS",
            help="file.py, file.py:name, package.module:name, a built-in model; or a script.",
        ),
    ],
    data: TargetData = None,
    backward: Annotated[bool, flag("--backward", "Profile loss and backward too.")] = False,
    schedule: Annotated[
        str | None, option("Steps: wait, warm-up, active, repeat.", "W,W,A,R")
    ] = None,
    blocking: Annotated[
        bool, flag("--blocking", "GPU: every launch waits, so that time falls on its cause.")
    ] = False,
    trace: Annotated[
        Path | None, option("Write a Chrome (Perfetto) trace.", "FILE", click_type=FILE)
    ] = None,
    tensorboard: Annotated[
        Path | None, option("Write for TensorBoard's profiler.", "DIR", click_type=FOLDER)
    ] = None,
    against: Annotated[Path | None, option("Compare with an earlier --json FILE.", "FILE")] = None,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Show where the time goes: split, findings, tables, memory.

    A script is started behind two dashes: fuselab profile -- python train.py --epochs 1. Its
    optimizer steps are the steps; a script without an optimizer is one step as a whole.
    """
    # torch reads this on import; its profiler warns of memory allocated before it started.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if blocking:
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"  # read when CUDA starts, which happens below

    from fuselab.device.select import select
    from fuselab.errors import ArgumentError
    from fuselab.inspect import compare
    from fuselab.report.compare_text import compare_text
    from fuselab.report.profile_text import profile_text
    from fuselab.report.result import read_result, write_result

    before = read_result(against, "profile") if against is not None else None
    chosen = select(device)
    if blocking and chosen.type != "cuda":
        raise ArgumentError("--blocking is for a GPU: on a CPU every operator waits already.")
    if target == "python":
        if data is not None or backward:
            raise ArgumentError("--data and --backward belong to a TARGET; a script has its own.")
        profiled = _script(context.args, schedule)
        called: dict[str, Any] = {"script": context.args[0], "arguments": context.args[1:]}
    elif context.args:
        raise ArgumentError(
            f"unexpected '{context.args[0]}' behind the TARGET; a script is started as "
            "'fuselab profile -- python script.py'."
        )
    else:
        profiled = _target(target, chosen, data, backward, schedule)
        called = {"target": target, "data": data, "backward": backward}
    facts = {**called, "blocking": blocking, **profiled.describe()}
    print(profile_text(facts))
    if before is not None:
        facts["against"] = compare.compare(before, facts)
        print()
        print(compare_text(facts["against"], str(against)))
    if trace is not None:
        profiled.save_trace(trace)
    if tensorboard is not None:
        profiled.save_tensorboard(tensorboard)
    write_result(json, "profile", facts, chosen)


def _target(
    target: str, device: Any, data: str | None, backward: bool, schedule: str | None
) -> Profile:
    from fuselab.inspect import targets
    from fuselab.inspect.profile import parse_schedule, profile_target

    steps = {} if schedule is None else {"schedule": parse_schedule(schedule)}
    return profile_target(targets.load(target, device, data), backward=backward, **steps)


def _script(command: list[str], schedule: str | None) -> Profile:
    from fuselab.errors import ArgumentError
    from fuselab.inspect.profile import parse_schedule
    from fuselab.inspect.script import profile_script

    if not command:
        raise ArgumentError("name the script: fuselab profile -- python script.py ARGS.")
    steps = {} if schedule is None else {"schedule": parse_schedule(schedule)}
    return profile_script(command[0], command[1:], **steps)
