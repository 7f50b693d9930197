"""``fuselab debug``: any Triton kernel on the CPU, line by line, with its tensors to look at."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import FILE, Json, flag, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("debug")(debug)


def debug(
    subject: Annotated[
        str,
        typer.Argument(
            metavar="OP|FOLDER|FILE",
            help="An operator, a kernel package, or FILE.py[:NAME] with Triton kernels.",
        ),
    ],
    at: Annotated[int | None, option("Stop before this line of a kernel, in pdb.", "LINE")] = None,
    program: Annotated[
        list[str] | None,
        option("Only this program: 2, or 0,3 of a grid with two dimensions; may repeat.", "ID"),
    ] = None,
    show: Annotated[
        list[str] | None,
        option("Print a variable instead of stopping: at --at, else when new.", "NAME", "--print"),
    ] = None,
    picture: Annotated[
        Path | None,
        option(
            "Draw which offsets each program touches, and what the mask cuts.",
            "FILE",
            click_type=FILE,
        ),
    ] = None,
    against: Annotated[
        str | None,
        option("Compare the result with a torch expression of the arguments: 'x + y'.", "EXPR"),
    ] = None,
    grid: Annotated[str | None, option("The programs of a bare kernel: 4, or 4,2.", "N")] = None,
    case: Annotated[str | None, option("An operator's case, for its inputs.")] = None,
    implementation: Annotated[
        str | None, option("An operator's implementation; triton by default.")
    ] = None,
    backward: Annotated[bool, flag("--backward", "An operator's backward.")] = False,
    json: Json = None,
) -> None:
    """Run Triton kernels on the CPU: stop, print, draw, compare.

    Without --at and --print it says which offsets every program touches. Inputs are those of
    get_inputs() in the file, or of an operator's case. Exit status 1 if --against differs.
    """
    from fuselab.inspect.debugger import session
    from fuselab.report.debug_text import debug_text
    from fuselab.report.plots import check_plot
    from fuselab.report.result import write_result

    if picture is not None:
        check_plot(picture)
    names = [name.strip() for each in show or () for name in each.split(",")]
    found = session.run(
        session.Session(
            subject,
            at=at,
            programs=[session.program_of(each) for each in program or ()],
            names=names,
            against=against,
            case=case,
            implementation=implementation,
            backward=backward,
            grid=None if grid is None else session.grid_of(grid),
        )
    )
    if at is None and not names:
        print(debug_text(found))
    elif found["against"]:
        print(debug_text({**found, "kernels": [], "accesses": [], "left_out": 0}).strip())
    if picture is not None:
        from fuselab.report import files
        from fuselab.report.access_picture import access_picture

        with files.replacing(picture) as temporary:
            access_picture(found, temporary)
    write_result(json, "debug", found)
    if any(not compared["within"] for compared in found["against"]):
        raise typer.Exit(1)
