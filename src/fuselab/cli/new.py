"""``fuselab new``: make a kernel package of a user's own kernel, or of a plain function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import Json, flag, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("new")(new)


def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The operator's name.")],
    source: Annotated[
        str,
        option(
            "FILE.py[:NAME] with Triton kernels, FILE.cu[:KERNEL], or a plain function or module.",
            "FILE|FUNCTION",
            "--from",
        ),
    ],
    reference: Annotated[
        str | None,
        option("The plain PyTorch function that says what is right.", "FILE.py:FUNCTION"),
    ] = None,
    backward: Annotated[
        bool, flag("--backward", "Eject the gradient from the reference, so that it trains.")
    ] = False,
    block: Annotated[
        str | None,
        option("Threads of a .cu kernel's block, if its file does not tell.", "X[,Y[,Z]]"),
    ] = None,
    constants: Annotated[
        list[str] | None,
        option("A constant of a .cu kernel's template; may repeat.", "NAME=VALUE", "--set"),
    ] = None,
    output: Annotated[
        Path | None, option("The folder to write; NAME by default.", "DIR", "--output", "-o")
    ] = None,
    force: Annotated[
        bool, flag("--force", "Replace an earlier package, but no file edited by hand.")
    ] = False,
    json: Json = None,
) -> None:
    """Make a kernel package of your own kernel.

    What the files tell is derived; what only you can know is marked FILL IN, and check says what is
    left. Exit status 1 if files edited by hand were kept; the new ones are beside them.
    """
    from fuselab.device.select import select
    from fuselab.ejection.folder import check_folder, write_folder
    from fuselab.packaging.cuda_block import asked_of
    from fuselab.packaging.new import check_name, new_package
    from fuselab.report.new_text import new_text
    from fuselab.report.result import write_result

    check_name(name)
    folder = output or Path(name)
    check_folder(folder, force)
    made = new_package(name, source, reference, backward, asked_of(block, constants or ()))
    kept = write_folder(folder, made.files, made.about, force)
    facts = {"source": source, "folder": str(folder), **made.facts, "kept": kept}
    print(new_text(facts))
    write_result(json, "new", facts, select("cpu"))
    if kept:
        raise typer.Exit(1)
