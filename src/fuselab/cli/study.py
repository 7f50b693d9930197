"""``fuselab study``: the whole loop for one target, and one report of it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import (
    FOLDER,
    Device,
    Json,
    Target,
    TargetData,
    flag,
    output_option,
    run_with_pinned_allocation,
)


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(study)


def study(
    context: typer.Context,
    target: Target,
    output: Annotated[Path, output_option("Where the report goes.", "DIR", FOLDER)],
    data: TargetData = None,
    backward: Annotated[
        bool, flag("--backward", "Study forward and backward, not the forward alone.")
    ] = False,
    quick: Annotated[bool, flag("--quick", "Time for a quarter as long.")] = False,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Profile, explain, fuse, check and bench a TARGET.

    Writes DIR/report.html and report.json, and to DIR/kernels the packages of the kernels that were
    written for the target and are faster. Exit status 1: an operator that was tried in the target
    fails its check.
    """
    from fuselab.device.select import select

    where = select(device)
    run_with_pinned_allocation(context, where)

    from fuselab.report import files
    from fuselab.report.html import study_page
    from fuselab.report.progress import say
    from fuselab.report.result import result, write_payload
    from fuselab.report.screen import cut
    from fuselab.report.study_text import study_text
    from fuselab.study.run import study as run

    start = time.monotonic()

    def progress(text: str) -> None:
        say(cut(f"{time.monotonic() - start:6.1f} s  {text}"))

    with files.folder_for_results(output):
        found = run(
            target,
            data=data,
            device=where,
            backward=backward,
            quick=quick,
            kernels=output / "kernels",
            progress=progress,
        )
        facts = result("study", found.describe(), where)
        page = output / "report.html"
        files.write_json(output / "report.json", facts)
        files.write_text(page, study_page(facts))
    write_payload(json, facts)
    print(study_text(facts))
    print(f"\nreport: {page}")
    if any(check.verdict == "FAIL" for check in found.checks):
        raise typer.Exit(1)
