"""``fuselab train boxes``: a small detector, its GIoU loss in every spelling, timed by ranges."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from fuselab.cli.options import Device, Json, option
from fuselab.report.progress import say
from fuselab.report.screen import table

if TYPE_CHECKING:
    from fuselab.train.boxes import BoxesResult


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("boxes")(boxes)


def boxes(
    loss: Annotated[
        list[str] | None,
        option(
            "eager, compile, cuda, triton, compile(triton), cpp; repeatable; default all "
            "that run here.",
            "LOSS",
        ),
    ] = None,
    mode: Annotated[
        list[str] | None,
        option("How the model runs: eager, compile; repeatable; default both.", "MODE"),
    ] = None,
    batch_size: Annotated[int, option("Images of a batch, 256 cells each.")] = 16,
    steps: Annotated[int, option("Steps of a run.")] = 20,
    runs: Annotated[int, option("Runs over which times are averaged.")] = 3,
    seed: Annotated[int, option("Seed of the images and the weights.")] = 0,
    device: Device = "auto",
    json: Json = None,
) -> int:
    """Train a detector by every spelling of its GIoU loss.

    The boxes are synthetic and padded; training is under bfloat16 autocast. Every loss is trained
    with the model eager and compiled, with and without casts of the boxes to float32, and the parts
    of a step are timed. Exit status 1: spellings of the loss ended at different held-out losses.
    """
    from fuselab.device.select import select
    from fuselab.report.result import write_result
    from fuselab.train.boxes import MODELS, Settings, train

    where = select(device)
    losses = tuple(dict.fromkeys(loss)) if loss else None
    models = tuple(dict.fromkeys(mode or MODELS))
    settings = Settings(losses, models, batch_size, steps, runs, seed)
    result = train(settings, where, lambda sentence: say(f"{sentence} ..."))
    _show(result, on_gpu=where.type == "cuda")
    write_result(json, "train boxes", {**asdict(result), "agree": result.agree}, where)
    return 0 if result.agree else 1


def _show(result: BoxesResult, on_gpu: bool) -> None:
    from fuselab.report.numbers import digits
    from fuselab.train.boxes import RANGES

    settings = result.settings
    clock = "events on the GPU's stream" if on_gpu else "wall time; on a CPU nothing is copied"
    print(
        f"us per step of {settings.batch_size} images of 256 cells, bfloat16 autocast: mean of "
        f"{settings.runs} x {settings.steps} steps\n({clock})\n"
    )
    rows = [
        [
            one.variant.loss,
            one.variant.model,
            "float32" if one.variant.casts else "none",
            *(digits(one.ranges_us[name]) for name in RANGES[:4]),
            digits(one.step_us),
            f"{one.held_out:.3f}",
        ]
        for one in result.variants
    ]
    columns = ["loss", "model", "casts", *RANGES[:4], "step", "held out"]
    print("\n".join(table(columns, rows, right=range(3, 9))))
    print(f"\nheld-out loss before training: {result.before:.3f}")
    for name, reason in result.left_out.items():
        print(f"left out: {name} {reason}")
    print("all losses agree" if result.agree else "losses DISAGREE after training")
