"""``fuselab eject``: write a plain PyTorch function as a package of fused kernels."""

from __future__ import annotations

from dataclasses import replace
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
    standalone: Annotated[
        bool,
        flag("--standalone", "Write what needs only torch and Triton (without CUDA C++)."),
    ] = False,
    whole: Annotated[
        bool,
        flag("--whole", "Also write one kernel of all, small matrix products too."),
    ] = False,
    force: Annotated[
        bool, flag("--force", "Replace an earlier package, but no file edited by hand.")
    ] = False,
    prove: Annotated[
        bool, flag("--prove", "Then check the package (quick) and time it beside eager.")
    ] = False,
    data: TargetData = None,
    json: Json = None,
) -> None:
    """Write a plain PyTorch function as kernels that you own.

    Exit status 1 if files edited by hand were kept; the new ones are beside them. With --prove
    also if the check fails.
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
    made = ejected(found.callable, found.args, found.kwargs, named, inference, standalone, whole)
    if whole:
        from fuselab.inspect.forms import section

        say("fuselab: compiling the kernels of both forms for sm_90 ...")
        page = f"{made.facts['whole']['name']}/page.md"
        compared = made.files[page] + section(made.files, output.name)
        made = replace(made, files={**made.files, page: compared})
    kept = write_folder(output, made.files, made.about, force)
    facts = {"target": target, "folder": str(output), **made.facts, "kept": kept}
    print(eject_text(facts))
    write_result(json, "eject", facts, select("cpu"))
    if kept:
        raise typer.Exit(1)
    if prove and not _is_proved(str(output), inference):
        raise typer.Exit(1)


def _is_proved(folder: str, inference: bool) -> bool:
    """Check a package and, if it is right, time it; print both; return whether it is right."""
    from fuselab.composition import Composition
    from fuselab.prove.bench import bench
    from fuselab.prove.check import check
    from fuselab.prove.load import load
    from fuselab.report.check_text import show
    from fuselab.report.progress import say
    from fuselab.report.tables import bench_table, console

    report = check(folder, quick=True, progress=say)
    show(report, console())
    if report.passed:
        subject = load(folder)
        op = subject.as_operator() if isinstance(subject, Composition) else subject
        timed = bench(op, backward=not inference, quick=True, progress=say)
        console().print(bench_table(timed))
    return report.passed
