"""``fuselab tune``: time a bare Triton kernel with other constants, warps and stages."""

from __future__ import annotations

from typing import Annotated

import typer

from fuselab.cli.options import Device, Json, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("tune")(tune)


def tune(
    kernel: Annotated[
        str, typer.Argument(metavar="FILE:KERNEL", help="A @triton.jit kernel in a plain file.")
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
    budget: Annotated[float, option("Seconds of timing.", "S")] = 10.0,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Time a bare Triton kernel's settings on a GPU.

    Arguments are those of get_inputs() in the file. Settings with other results are listed as
    wrong. An operator is tuned by 'fuselab bench OP --tune'.
    """
    from fuselab.packaging.tune_kernel import lists_of, on_gpu, planned, tuned
    from fuselab.report.progress import say
    from fuselab.report.result import write_result
    from fuselab.report.tune_text import tune_text

    plan = planned(kernel, lists_of(lists or ()), grid)
    where = on_gpu(device, kernel)
    say(f"fuselab: {plan.name}, {len(plan.settings)} settings ...")
    facts = {"target": kernel, **tuned(plan, where, budget)}
    print(tune_text(facts))
    write_result(json, "tune", facts, where)
