"""``fuselab eject``: write a plain PyTorch function as a package of fused kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import Json, Target, TargetData, flag, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("eject")(eject)


def eject(
    target: Target,
    output: Annotated[Path, option("The folder to write.", "DIR", "--output", "-o")],
    name: Annotated[
        str | None, option("The operator's name; the target's by default.", "N")
    ] = None,
    inference: Annotated[bool, flag("--inference", "Write no backward.")] = False,
    force: Annotated[
        bool, flag("--force", "Replace an earlier package, but no file edited by hand.")
    ] = False,
    data: TargetData = None,
    json: Json = None,
) -> None:
    """Write a plain PyTorch function as kernels that you own.

    Exit status 1 if files edited by hand were kept; the new ones are beside them.
    """
    from fuselab.device.select import select
    from fuselab.ejection.eject import default_name, ejected
    from fuselab.ejection.folder import check_folder, write_folder
    from fuselab.inspect import targets
    from fuselab.report.eject_text import eject_text
    from fuselab.report.progress import say
    from fuselab.report.result import write_result

    check_folder(output, force)
    found = targets.load(target, select("cpu"), data)
    named = name or default_name(found.callable)
    say(f"fuselab: capturing {found.name} ...")
    made = ejected(found.callable, found.args, found.kwargs, named, inference)
    kept = write_folder(output, made.files, made.about, force)
    facts = {"target": target, "folder": str(output), **made.facts, "kept": kept}
    print(eject_text(facts))
    write_result(json, "eject", facts, select("cpu"))
    if kept:
        raise typer.Exit(1)
