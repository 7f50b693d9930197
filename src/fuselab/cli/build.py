"""``fuselab build``: a kernel package in the forms that others can use."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import FOLDER, Json, option, output_option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("build")(build)


def build(
    package: Annotated[
        str,
        typer.Argument(
            metavar="PACKAGE", help="A folder that eject or new wrote, or a file with an operator."
        ),
    ],
    form: Annotated[
        str,
        option(
            "wheel; kernels, the folder that Hugging Face's kernels loads; cmake or load_inline, "
            "the operators in C++ for programs without Python, or for this one.",
            "FORM",
            "--as",
        ),
    ],
    output: Annotated[Path, output_option("Where to write it.", "DIR", FOLDER)],
    name: Annotated[
        str | None, option("The name to import; the folder's or the operator's by default.", "N")
    ] = None,
    version: Annotated[
        str | None, option("0.1.0 of a wheel and 1 of a kernel by default.", "V")
    ] = None,
    json: Json = None,
) -> None:
    """Make a wheel, a Hub folder or C++ operators of a package.

    A wheel, a Hub folder and an extension are imported once, alone, in a process of their own.
    """
    from fuselab.errors import UnknownNameError
    from fuselab.packaging.build import FORMS, VERSIONS, read
    from fuselab.report.result import write_result
    from fuselab.report.screen import print_folded

    if form not in FORMS:
        raise UnknownNameError("form", form, FORMS)
    facts = FORMS[form](read(package, name), output, version or VERSIONS.get(form, ""))
    print(f"{', '.join(facts['operators'])}: {', '.join(facts['written'])}")
    print_folded("  needs ", ", ".join(facts["needs"]))
    for note in facts["notes"]:
        print_folded("  ", note)
    print(f"  use it by {facts['use']}")
    write_result(json, "build", {"form": form, **facts})
