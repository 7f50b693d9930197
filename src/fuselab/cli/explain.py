"""``fuselab explain``: how torch.compile compiles a TARGET, and how much faster that makes it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuselab.cli.options import FOLDER, Json, Target, TargetData, flag, option

if TYPE_CHECKING:
    from fuselab.inspect.assembly.architectures import Architecture


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
    batches: Annotated[
        str | None, option("The sizes for --dynamic, which it implies: 1,32,500.", "N,N")
    ] = None,
    mode: Annotated[
        str, option("torch.compile's mode, or several with commas, side by side.", "M,M")
    ] = "default",
    save: Annotated[
        Path | None,
        option("Write each kernel and graph as a file that runs.", "DIR", click_type=FOLDER),
    ] = None,
    device: Annotated[str, option("auto, cpu, cuda, cuda:N, or cuda:sm_90.")] = "auto",
    json: Json = None,
) -> None:
    """Show graph breaks, recompiles, compile time, the kernels written.

    --device cuda:sm_90 shows the Triton kernels for a GPU that need not be there.
    """
    from fuselab.device.select import select
    from fuselab.inspect import targets
    from fuselab.inspect.explain import explain_target, explain_without_gpu
    from fuselab.report.explain_text import explain_text
    from fuselab.report.progress import say
    from fuselab.report.result import write_result

    def progress(words: str) -> None:
        say(f"fuselab: {words} ...")

    if device.startswith("cuda:sm_"):
        chosen = select("cpu")
        explanation = explain_without_gpu(
            targets.load(target, chosen, data),
            _architecture(device, dynamic or batches is not None, mode),
            backward=backward,
            progress=progress,
        )
    else:
        chosen = select(device)
        explanation = explain_target(
            targets.load(target, chosen, data),
            backward=backward,
            dynamic=dynamic or batches is not None,
            mode=mode,
            batches=_sizes(batches),
            progress=progress,
        )
    facts = {"target": target, "data": data, **explanation.describe()}
    print(explain_text(facts))
    if save is not None:
        for path in explanation.save(save):
            say(f"fuselab: wrote {path}")
    write_result(json, "explain", facts, chosen)


def _sizes(batches: str | None) -> tuple[int, ...]:
    """Return the batch sizes of ``--batches``. Raises ArgumentError."""
    from fuselab.errors import ArgumentError

    words = batches.split(",") if batches is not None else []
    if not all(word.strip().isdigit() for word in words):
        raise ArgumentError(f"--batches {batches}: write whole numbers with commas, as 1,32,500.")
    return tuple(map(int, words))


def _architecture(device: str, dynamic: bool, mode: str) -> Architecture:
    """Return the GPU that ``cuda:sm_90`` means. Raises ArgumentError."""
    from fuselab.errors import ArgumentError
    from fuselab.inspect.assembly.architectures import architecture

    if dynamic or mode != "default":
        raise ArgumentError(
            f"--dynamic, --batches and --mode run what was compiled; {device} is a GPU that is not "
            "there."
        )
    return architecture(device.removeprefix("cuda:"))
