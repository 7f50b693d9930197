"""``fuselab explain``: how torch.compile compiles a TARGET, and how much faster that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fuselab.cli.options import FOLDER, Device, Json, Target, TargetData, flag, option


def add(app: typer.Typer) -> None:
    """Register the verb."""
    app.command("explain")(explain)


def explain(
    target: Target,
    data: TargetData = None,
    backward: Annotated[bool, flag("--backward", "Compile the backward too.")] = False,
    dynamic: Annotated[
        bool, flag("--dynamic", "Call it with other batch sizes: what recompiles.")
    ] = False,
    mode: Annotated[str, option("torch.compile's mode.", "M")] = "default",
    save: Annotated[
        Path | None, option("Write the generated code and the graphs.", "DIR", click_type=FOLDER)
    ] = None,
    device: Device = "auto",
    json: Json = None,
) -> None:
    """Show graph breaks, recompiles, compile time, the kernels written."""
    from fuselab.device.select import select
    from fuselab.inspect import targets
    from fuselab.inspect.explain import explain_target
    from fuselab.report.explain_text import explain_text
    from fuselab.report.progress import say
    from fuselab.report.result import write_result

    chosen = select(device)
    explanation = explain_target(
        targets.load(target, chosen, data),
        backward=backward,
        dynamic=dynamic,
        mode=mode,
        progress=lambda words: say(f"fuselab: {words} ..."),
    )
    facts = {"target": target, "data": data, **explanation.describe()}
    print(explain_text(facts))
    if save is not None:
        for path in explanation.save(save):
            say(f"fuselab: wrote {path}")
    write_result(json, "explain", facts, chosen)
