"""``fuselab bench``: how fast every provider of an operator is, and how far from the ceiling."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselab.cli.options import (
    FILE,
    FOLDER,
    Device,
    Json,
    Operator,
    call_of,
    dtype_of,
    flag,
    option,
    output_option,
    run_with_pinned_allocation,
)
from fuselab.errors import ArgumentError
from fuselab.report.progress import say

if TYPE_CHECKING:
    import torch


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(bench)


def bench(
    context: typer.Context,
    op: Operator,
    provider: Annotated[str | None, option("Time these (and eager); default all.", "A,B")] = None,
    case: Annotated[list[str] | None, option("Time this case; may be repeated.", "CASE")] = None,
    backward: Annotated[
        bool, flag("--backward", "Time the backward and forward+backward too.")
    ] = False,
    dtype: Annotated[
        list[str] | None, option("float32, bfloat16, ...; repeatable.", "DTYPE")
    ] = None,
    tune: Annotated[
        bool, flag("--tune", "Time every configuration the operator offers; save the best.")
    ] = False,
    ship: Annotated[
        bool, flag("--ship", "With --tune: save beside the operator, for everyone.")
    ] = False,
    survey: Annotated[
        bool, flag("--survey", "Time auto at drawn points: where it wins, where it loses.")
    ] = False,
    points: Annotated[int | None, option("With --survey: how many; default 40.", "N")] = None,
    point: Annotated[
        list[int] | None, option("With --survey: this one alone; repeatable.", "I")
    ] = None,
    worst: Annotated[bool, flag("--worst", "With --survey: time the losing points again.")] = False,
    choose: Annotated[
        bool, flag("--choose", "With --survey: let auto go by it on this machine.")
    ] = False,
    output: Annotated[
        Path | None,
        output_option("With --survey: keep it here, continue one.", "DIR", FOLDER),
    ] = None,
    quick: Annotated[bool, flag("--quick", "Three cases, a short budget, no energy.")] = False,
    budget: Annotated[float | None, option("Seconds of timing per case and phase.", "S")] = None,
    seed: Annotated[int, option("Seed of the order of the rounds, and of a survey's points.")] = 0,
    plot: Annotated[
        Path | None,
        option("A figure: .png, .svg, .pdf.", "FILE", click_type=FILE),
    ] = None,
    against: Annotated[
        Path | None, option("An earlier --json; say what got slower.", "FILE")
    ] = None,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Time an operator's providers against eager and the limit.

    Providers are verified before they are timed, and timed in turns. Exit status 1: one of our
    implementations, or with --tune one of its configurations, is wrong, failed or is above the
    limit, or something became slower.
    """
    from fuselab.device.select import select

    if survey:
        _survey(locals())
        return
    if points is not None or point or worst or choose or output is not None:
        raise ArgumentError(
            "--points, --point, --worst, --choose and --output belong to --survey; add it."
        )
    if ship and not tune:
        raise ArgumentError("--ship says where --tune saves; add --tune.")
    if tune and (plot is not None or against is not None or quick):
        raise ArgumentError("--tune goes without --plot, --against and --quick; leave them out.")
    where = select(device)
    if not tune and _is_judged_from_outside(op, where):
        raise typer.Exit(_from_outside(context, op, provider, json))
    run_with_pinned_allocation(context, where)

    if tune:
        _tune(locals(), where)
        return

    import fuselab.prove.bench as benchmark
    from fuselab.composition import Composition
    from fuselab.prove import bench_against
    from fuselab.prove.load import load
    from fuselab.report import files, plots, tables
    from fuselab.report.result import read_result, write_payload

    if plot is not None:
        plots.check_plot(plot)
    earlier = read_result(against, "bench") if against is not None else None
    subject = load(op)
    providers = provider.split(",") if provider is not None else None
    if isinstance(subject, Composition):
        subject = subject.as_operator()
        providers = providers or ["compile", "fused"]
    result = benchmark.bench(
        subject,
        providers=providers,
        cases=case,
        dtypes=[dtype_of(name) for name in dtype] if dtype else None,
        backward=backward,
        device=where,
        budget_s=budget,
        quick=quick,
        seed=seed,
        progress=say,
    )
    screen = tables.console()
    screen.print(tables.bench_table(result))
    payload = result.to_json()
    compared = None
    if earlier is not None:
        compared = bench_against.compare(result, earlier)
        screen.print(tables.against_table(compared))
        payload["against"] = compared
    for line in result.failures:
        say(f"FAIL {line}")
    write_payload(json, payload)
    if plot is not None:
        with files.replacing(plot) as temporary:
            plots.bench_plot(result, temporary)
    if result.failures or (compared is not None and compared.slower):
        raise typer.Exit(1)


def _is_judged_from_outside(op: str, device: torch.device) -> bool:
    """Return whether this process is the judge of a user's file: on a CPU, unless it is the one
    that measures."""
    from fuselab.measure.fresh import allocation_is_pinned
    from fuselab.prove.load import is_library_name

    return device.type == "cpu" and not is_library_name(op) and not allocation_is_pinned()


def _from_outside(context: typer.Context, op: str, provider: str | None, json: Path | None) -> int:
    """Let a fresh process measure and print, hold its claims against the clock of this one, and
    return the exit status."""
    import tempfile

    from fuselab.measure.fresh import run_pinned
    from fuselab.prove.bench_outside import measured_outside
    from fuselab.prove.load import refuse_unknown
    from fuselab.report import tables
    from fuselab.report.result import read_result, write_payload

    refuse_unknown(op)
    with tempfile.TemporaryDirectory(prefix="fuselab-bench-") as folder:
        claimed = Path(folder) / "claims.json"
        words = [*call_of(context, without=("json",)), "--json", str(claimed)]
        status = run_pinned("fuselab", words)
        if status not in (0, 1) or not claimed.is_file():
            if status in (0, 1):
                say(f"{op}: the process that measured it ended without a result.")
            return status or 1
        payload = read_result(claimed, "bench")
    wanted = provider.split(",") if provider is not None else None
    outside = measured_outside(op, payload, wanted, progress=say)
    screen = tables.console()
    for one in outside:
        screen.print(one.line, soft_wrap=True)
    payload["outside"] = [asdict(one) for one in outside]
    write_payload(json, payload)
    return 1 if any(one.problem for one in outside) else status


def _tune(given: dict[str, Any], device: torch.device) -> None:
    """Run --tune: print what was tried, save the choices, and exit with status 1 for a wrong
    one."""
    from fuselab.prove.load import load_op
    from fuselab.prove.tune import tune
    from fuselab.report import tables
    from fuselab.report.result import write_payload

    found = tune(
        load_op(given["op"]),
        implementations=given["provider"].split(",") if given["provider"] is not None else None,
        cases=given["case"],
        dtypes=[dtype_of(name) for name in given["dtype"]] if given["dtype"] else None,
        backward=given["backward"],
        device=device,
        budget_s=given["budget"],
        seed=given["seed"],
        ship=given["ship"],
        command=shlex.join(["fuselab", *call_of(given["context"], without=("json", "seed"))]),
        progress=say,
    )
    tables.console().print(tables.tuning_table(found))
    write_payload(given["json"], found.to_json())
    if found.wrong or not any(one.is_chosen for case in found.cases for one in case.tried):
        raise typer.Exit(1)


def _survey(given: dict[str, Any]) -> None:
    """Run --survey: print the map, and exit with status 1 for a wrong result."""
    from fuselab.device.select import select
    from fuselab.report import files, plots, survey_plot, survey_text, tables
    from fuselab.report.result import write_payload

    others = {
        "--tune": given["tune"],
        "--ship": given["ship"],
        "--case": given["case"],
        "--quick": given["quick"],
        "--against": given["against"],
    }
    for name, value in others.items():
        if value:
            raise ArgumentError(f"--survey goes without {name}; leave it out.")
    if given["points"] is not None and given["point"]:
        raise ArgumentError("--points gives a number of points and --point names them; give one.")
    where = select(given["device"])
    if given["plot"] is not None:
        plots.check_plot(given["plot"])
    run_with_pinned_allocation(given["context"], where)

    from fuselab.composition import Composition
    from fuselab.prove import survey, survey_ahead
    from fuselab.prove.load import load
    from fuselab.runtime import surveyed_choice

    subject = load(given["op"])
    if given["choose"] and isinstance(subject, Composition):
        raise ArgumentError(
            f"--choose is for operators, and {given['op']} is composed of several: survey each."
        )
    found = survey.survey(
        subject,
        points=survey.POINTS if given["points"] is None else given["points"],
        only=given["point"] or None,
        seed=given["seed"],
        backward=given["backward"],
        worst=given["worst"],
        providers=given["provider"].split(",") if given["provider"] is not None else None,
        dtypes=[dtype_of(name) for name in given["dtype"]] if given["dtype"] else None,
        device=where,
        budget_s=given["budget"],
        folder=given["output"],
        named=given["op"],
        ahead=survey_ahead.processes(where),
        progress=say,
    )
    tables.console().print(survey_text.survey_table(found))
    for line in found.failures:
        say(f"FAIL {line}")
    write_payload(given["json"], found.to_json())
    if given["plot"] is not None:
        with files.replacing(given["plot"]) as temporary:
            survey_plot.survey_plot(found, temporary)
    if found.failures:
        raise typer.Exit(1)
    if given["choose"] and not isinstance(subject, Composition):
        say(f"auto goes by {surveyed_choice.write(subject, where, found.choices())}.")
