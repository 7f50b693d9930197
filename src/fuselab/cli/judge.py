"""``fuselab judge``: one verdict on each answer to a problem of a public kernel set."""

from __future__ import annotations

from typing import Annotated

import typer

from fuselab.cli.options import Device, Json, flag, option
from fuselab.device.select import select
from fuselab.prove.judge_problem import ProblemReport, judge_problem
from fuselab.prove.processes import CALL_LIMIT_S
from fuselab.report import standard_output
from fuselab.report.judge_text import show_judgements
from fuselab.report.progress import say
from fuselab.report.result import write_result
from fuselab.report.tables import console


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(judge)


def judge(
    problem: Annotated[
        str, typer.Argument(metavar="PROBLEM", help="A file with Model and get_inputs.")
    ],
    candidates: Annotated[
        list[str], typer.Argument(metavar="CANDIDATE...", help="Files with ModelNew.")
    ],
    quick: Annotated[
        bool, flag("--quick", "Fewer inputs, a second of timing, no torch.compile.")
    ] = False,
    seed: Annotated[int | None, option("Seed of inputs and parameters; drawn by default.")] = None,
    call_limit: Annotated[
        float, option("Seconds for one call; the first of each kind has five times as long.", "S")
    ] = CALL_LIMIT_S,
    memory: Annotated[float, option("GiB by which a candidate's process may grow.", "GIB")] = 8.0,
    json: Json = None,
    device: Device = "auto",
) -> None:
    """Judge answers to a problem: right or not, how fast.

    Each runs in a process of its own. Exit status 1 if any is not right. The file of --json is
    rewritten after every verdict, and its "complete" says whether all are there.
    """
    place = select(device)

    def keep(report: ProblemReport) -> None:
        if json is not None and (report.complete or not standard_output.is_meant(json)):
            write_result(json, "judge", report.facts(), place)

    report = judge_problem(
        problem,
        candidates,
        place,
        seed,
        quick,
        with_compile=not quick,
        call_limit_s=call_limit,
        memory_gib=memory,
        progress=say,
        judged=keep,
    )
    show_judgements(report, console())
    if not report.passed:
        raise typer.Exit(1)
