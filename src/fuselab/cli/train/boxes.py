"""``fuselab train boxes``: a small detector, its GIoU loss in every spelling, timed by ranges; or
the user's own loss, model and data."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuselab.cli.options import FILE, Device, Json, option
from fuselab.report.progress import say
from fuselab.report.screen import table

if TYPE_CHECKING:
    from fuselab.train.boxes import BoxesResult, VariantResult


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("boxes")(boxes)


def boxes(
    loss: Annotated[
        list[str] | None,
        option(
            "eager, compile, cuda, triton, compile(triton), cpp; repeatable; default all "
            "that run here. Or your own, as FILE:NAME.",
            "LOSS",
        ),
    ] = None,
    model: Annotated[
        str | None, option("Your own nn.Module class instead of the detector.", "FILE:NAME")
    ] = None,
    data: Annotated[
        str | None,
        option("Your own function that returns a batch (inputs, target).", "FILE:NAME"),
    ] = None,
    mode: Annotated[
        list[str] | None,
        option("How the model runs: eager, compile; repeatable; default both.", "MODE"),
    ] = None,
    batch_size: Annotated[int, option("Images of a batch, 256 cells each.")] = 16,
    steps: Annotated[int, option("Steps of a run.")] = 20,
    runs: Annotated[int, option("Runs over which times are averaged.")] = 3,
    seed: Annotated[int, option("Seed of the images and the weights.")] = 0,
    plot: Annotated[
        Path | None, option("Draw the parts of a step.", "FILE", click_type=FILE)
    ] = None,
    device: Device = "auto",
    json: Json = None,
) -> int:
    """Train a detector by every spelling of its GIoU loss.

    The boxes are synthetic and padded; training is under bfloat16 autocast. Every loss is trained
    with the model eager and compiled, with and without casts of the boxes to float32, and the parts
    of a step are timed. A loss of your own runs eager, compiled and fused. Exit status 1: spellings
    of the loss ended at different held-out losses.
    """
    from fuselab.device.select import select
    from fuselab.errors import ArgumentError
    from fuselab.measure.machine_state import waiting_share
    from fuselab.measure.statistics import significant
    from fuselab.report import files
    from fuselab.report.busy_text import busy_note
    from fuselab.report.plots import check_plot
    from fuselab.report.result import write_result
    from fuselab.report.train_plot import step_plot
    from fuselab.train.boxes import MODELS, Settings, train
    from fuselab.train.own import Own

    where = select(device)
    given = tuple(dict.fromkeys(loss or ()))
    named = [one for one in given if ".py" in one or ":" in one]
    if len(named) > 1:
        raise ArgumentError(f"one loss at a time: {named[0]} or {named[1]}.")
    losses = tuple(one for one in given if one not in named) or None
    own = Own(named[0] if named else None, model, data)
    if plot is not None:
        check_plot(plot)
    models = tuple(dict.fromkeys(mode or MODELS))
    settings = Settings(losses, models, batch_size, steps, runs, seed, own)
    with waiting_share() as waited:
        result = train(settings, where, lambda sentence: say(f"{sentence} ..."))
        waited_share = significant(waited())
    _show(result, on_gpu=where.type == "cuda")
    for line in busy_note(waited_share):
        print(line)
    if plot is not None:
        bars = {_named(result, one): one.ranges_us for one in result.variants}
        with files.replacing(plot) as temporary:
            step_plot("us per step, by part", bars, temporary)
        say(f"fuselab: wrote {plot}")
    facts = {**asdict(result), "agree": result.agree, "waited_share": waited_share}
    write_result(json, "train boxes", facts, where)
    return 0 if result.agree else 1


def _show(result: BoxesResult, on_gpu: bool) -> None:
    from fuselab.report.numbers import digits, ratio, share
    from fuselab.train.boxes import RANGES

    settings = result.settings
    clock = "events on the GPU's stream" if on_gpu else "wall time; on a CPU nothing is copied"
    batch = f"{settings.batch_size} images of 256 cells"
    print(
        f"us per step of {'a batch of your data' if settings.own.data else batch}, bfloat16 "
        f"autocast: mean of {settings.runs} x {settings.steps}\nsteps ({clock})\n"
    )
    with_casts = settings.own.model is None
    rows = [
        [
            one.variant.loss,
            one.variant.model,
            *(["float32" if one.variant.casts else "none"] if with_casts else []),
            *(digits(one.ranges_us[name]) for name in RANGES[1:4]),
            digits(one.step_us),
            ratio(result.speedup(one)),
            share(one.loss_share),
            f"{one.held_out:.3f}",
        ]
        for one in result.variants
    ]
    head = ["loss", "model", *(["casts"] if with_casts else [])]
    columns = [*head, *RANGES[1:4], "step", "speed", "share", "held out"]
    print("\n".join(table(columns, rows, right=range(len(head), len(columns)))))
    print(
        "\nspeed: how many times as fast the step is as that of the first row\n"
        "share: the loss's share of the step, without its backward"
    )
    print(f"held-out loss before training: {result.before:.3f}")
    for name, reason in result.left_out.items():
        print(f"left out: {name} {reason}")
    print("all losses agree" if result.agree else "losses DISAGREE after training")


def _named(result: BoxesResult, one: VariantResult) -> str:
    casts = "" if result.settings.own.model else f", {'with' if one.variant.casts else 'no'} casts"
    return f"loss {one.variant.loss}, model {one.variant.model}{casts}"
