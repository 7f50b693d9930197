"""``fuselab tune``: time a bare Triton kernel with other constants, warps and stages."""

from __future__ import annotations

from typing import Annotated

import typer

from fuselab.cli.options import Device, Json, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("tune")(tune)


def tune(
    target: Annotated[
        str,
        typer.Argument(
            metavar="FILE:NAME", help="A @triton.jit kernel, or a function that launches one."
        ),
    ],
    lists: Annotated[
        list[str] | None,
        option(
            "What to try of a constant, num_warps or num_stages; may repeat.",
            "NAME=1,2,4",
            "--set",
        ),
    ] = None,
    grid: Annotated[
        str | None,
        option("The programs, by the kernel's arguments: 'cdiv(numel, BLOCK)'.", "EXPR"),
    ] = None,
    kernel: Annotated[
        str | None, option("Of several that a function launches, this one.", "NAME")
    ] = None,
    budget: Annotated[float, option("Seconds of timing.", "S")] = 10.0,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Time a bare Triton kernel's settings on a GPU.

    Arguments are those of get_inputs() in the file, or those that a function called with them gives
    the kernel. Of a kernel with @triton.autotune its own configurations are timed. Settings with
    other results are listed as wrong. An operator is tuned by 'fuselab bench OP --tune'.
    """
    from fuselab.packaging.tune_kernel import gpu_of, lists_of, planned, tuned, without_gpu
    from fuselab.report.progress import say
    from fuselab.report.result import write_result
    from fuselab.report.tune_text import tune_text

    where = gpu_of(device)
    plan = planned(target, lists_of(lists or ()), grid, kernel, where)
    if where is None:
        raise without_gpu(target, plan)
    say(f"fuselab: {plan.name}, {len(plan.settings)} settings ...")
    facts = {"target": target, **tuned(plan, where, budget)}
    print(tune_text(facts))
    write_result(json, "tune", facts, where)
