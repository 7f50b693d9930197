"""``fuselab explain``: how torch.compile compiles a TARGET, and how much faster that makes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("explain")(explain)


def explain(
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="file.py, file.py:name, package.module:name or a built-in model.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option(metavar="PATH", help="What the file's get_inputs(data=...) reads.")
    ] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Compile the backward too.")] = False,
    dynamic: Annotated[
        bool, typer.Option("--dynamic", help="Call it with other batch sizes: what recompiles.")
    ] = False,
    mode: Annotated[str, typer.Option(metavar="M", help="torch.compile's mode.")] = "default",
    save: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Write the generated code and the graphs.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON too.")
    ] = None,
) -> None:
    """Show graph breaks, recompiles, compile time, the kernels written."""
    from fuselab.device.select import select
    from fuselab.inspect import targets
    from fuselab.inspect.explain import explain_target
    from fuselab.report import files
    from fuselab.report.explain_text import explain_text
    from fuselab.report.result import result

    chosen = select(device)
    explanation = explain_target(
        targets.load(target, chosen, data),
        backward=backward,
        dynamic=dynamic,
        mode=mode,
        progress=lambda words: print(f"fuselab: {words} ...", file=sys.stderr),
    )
    facts = {"target": target, "data": data, **explanation.describe()}
    print(explain_text(facts))
    if save is not None:
        for path in explanation.save(save):
            print(f"fuselab: wrote {path}", file=sys.stderr)
    if json is not None:
        files.write_json(json, result("explain", facts, chosen))
