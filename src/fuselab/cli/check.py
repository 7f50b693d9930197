"""``fuselab check``: test an operator for every known fault of a kernel."""

from __future__ import annotations

from typing import Annotated

import typer

from fuselab.cli.options import Device, Json, Operator, dtype_of, flag, option
from fuselab.device.select import select
from fuselab.prove.check import check as run_check
from fuselab.prove.processes import CALL_LIMIT_S
from fuselab.report.check_text import show
from fuselab.report.progress import say
from fuselab.report.result import write_result
from fuselab.report.tables import console


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command()(check)


def check(
    op: Operator,
    implementation: Annotated[
        str | None, option("Only this one; all of the operator's by default.")
    ] = None,
    dtype: Annotated[str | None, option("Only this one: float32, bfloat16, ..., int64.")] = None,
    quick: Annotated[bool, flag("--quick", "Fewer trials.")] = False,
    seed: Annotated[
        int | None,
        option("Equal seeds give equal results; drawn and printed by default, 0 with --case."),
    ] = None,
    case: Annotated[
        str | None, option("Repeat one trial, named as a failure prints it.", "CHECK@CASE")
    ] = None,
    budget: Annotated[
        float | None,
        option("Seconds for one implementation and dtype: 1200; with --quick 20.", "S"),
    ] = None,
    call_limit: Annotated[
        float, option("Seconds for one call; the first of each kind has five times as long.", "S")
    ] = CALL_LIMIT_S,
    json: Json = None,
    device: Device = "auto",
) -> None:
    """Prove an operator right: values, gradients, memory, PyTorch.

    Exit status 1 if it is not.
    """
    place = select(device)
    report = run_check(
        op,
        implementation,
        None if dtype is None else dtype_of(dtype),
        quick,
        seed,
        place,
        case,
        budget,
        progress=say,
        call_limit_s=call_limit,
    )
    show(report, console())
    write_result(json, "check", report.facts(), place)
    if not report.passed:
        raise typer.Exit(1)
