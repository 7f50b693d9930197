"""``fuselab train lora``: adapters on handwritten digits, eager, compiled and fused, compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuselab.cli.options import FILE, Device, Json, flag, option, output_option
from fuselab.report.progress import say
from fuselab.report.screen import table

if TYPE_CHECKING:
    from fuselab.train.lora import LoraResult, ModeResult
    from fuselab.train.lora_own import OwnLoraResult, OwnModeResult


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("lora")(lora)


def lora(
    mode: Annotated[
        list[str] | None, option("eager, compile or fused; repeatable; default all.", "MODE")
    ] = None,
    model: Annotated[
        str | None,
        option("Your own nn.Module class: adapters on every nn.Linear of it.", "FILE:NAME"),
    ] = None,
    data: Annotated[
        str | None,
        option("Your own function that returns a batch (inputs, target).", "FILE:NAME"),
    ] = None,
    loss: Annotated[
        str | None,
        option("Your own loss of output and target; cross entropy or MSE by default.", "FILE:NAME"),
    ] = None,
    hidden: Annotated[int, option("Width of both hidden layers.")] = 256,
    rank: Annotated[int, option("Rank of every layer's adapter.")] = 8,
    alpha: Annotated[float, option("The update is scaled by alpha / rank.")] = 16.0,
    steps: Annotated[int, option("Steps of Adam on the adapters.")] = 500,
    batch_size: Annotated[int, option("Rows of a batch.")] = 64,
    lr: Annotated[float, option("Learning rate, which decays to 0.")] = 5e-3,
    amp: Annotated[bool, flag("--amp", "Products in bfloat16.")] = False,
    output: Annotated[Path | None, output_option("Write the adapters as peft does.", "DIR")] = None,
    budget: Annotated[float, option("Seconds of timing.", "S")] = 2.0,
    seed: Annotated[int, option("Seed of the base, the adapters and the batches.")] = 0,
    plot: Annotated[
        Path | None, option("Draw the parts of a step.", "FILE", click_type=FILE)
    ] = None,
    device: Device = "auto",
    json: Json = None,
) -> int:
    """Train adapters on a frozen MLP, in every mode.

    The MLP knows the digits 0 to 4; the adapters learn 5 to 9. Every mode begins with the same
    weights and sees the same batches. Exit status 1: the modes reached different accuracies, or
    merging the adapters into the weights changed the accuracy.
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
    from fuselab.train.lora import Settings, train
    from fuselab.train.lora_modes import MODES
    from fuselab.train.lora_own import OwnLoraResult, train_own
    from fuselab.train.own import Own

    where = select(device)
    if plot is not None:
        check_plot(plot)
    settings = Settings(
        tuple(dict.fromkeys(mode or MODES)),
        hidden,
        rank,
        alpha,
        steps,
        batch_size,
        lr,
        amp,
        seed,
        budget,
    )
    own = Own(loss, model, data)

    def progress(sentence: str) -> None:
        say(f"{sentence} ...")

    result: LoraResult | OwnLoraResult
    if own.is_any and output is not None:
        raise ArgumentError("--output writes the adapters of the digits; leave it out.")
    with waiting_share() as waited:
        if own.is_any:
            result = train_own(settings, own, where, progress)
        else:
            result = train(settings, where, output, progress)
        waited_share = significant(waited())
    if isinstance(result, OwnLoraResult):
        _show_own(result)
    else:
        _show(result)
    for line in busy_note(waited_share):
        print(line)
    if plot is not None:
        with files.replacing(plot) as temporary:
            step_plot("a training step", {one.mode: _parts(one) for one in result.modes}, temporary)
        say(f"fuselab: wrote {plot}")
    facts = {**asdict(result), "agree": result.agree, "waited_share": waited_share}
    write_result(json, "train lora", facts, where)
    return 0 if result.agree else 1


def _show(result: LoraResult) -> None:
    settings = result.settings
    print(
        f"base: {result.parameters:,} parameters, {result.base_accuracy:.1%} of the digits 0 to 4 "
        f"and {result.before:.1%} of 5 to 9 right (held out)"
    )
    print(
        f"adapters of rank {settings.rank}: {result.trained:,} parameters, {settings.steps} steps "
        f"of {settings.batch_size} rows\n"
    )
    rows = [
        [
            mode.mode,
            f"{mode.loss:.4f}",
            f"{mode.accuracy:.1%}",
            *_step_cells(mode, result.modes[0]),
        ]
        for mode in result.modes
    ]
    columns = ["mode", "loss", "5 to 9 right", *STEP_COLUMNS]
    print("\n".join(table(columns, rows, right=range(1, len(columns)))))
    print(
        f"\nmerged: {result.merged_accuracy:.1%} right, logits off by at most "
        f"{result.merged_off:.2g}"
    )
    if result.exported is not None:
        print(f"exported: {result.exported}, read back into the base with the same weights")
    print(STEP_WORDS)
    print("all modes agree" if result.agree else "modes DISAGREE in accuracy")


def _show_own(result: OwnLoraResult) -> None:
    settings = result.settings
    print(
        f"{result.own.model}: {result.parameters:,} parameters, adapters of rank {settings.rank} "
        f"on {result.layers} linear layers:\n{result.trained:,} parameters train, "
        f"{settings.steps} steps\n"
    )
    rows = [
        [mode.mode, f"{mode.loss:.4f}", f"{mode.held_out:.4f}", *_step_cells(mode, result.modes[0])]
        for mode in result.modes
    ]
    columns = ["mode", "loss", "held out", *STEP_COLUMNS]
    print("\n".join(table(columns, rows, right=range(1, len(columns)))))
    print(f"\nheld-out loss before training: {result.before:.4f}")
    print(STEP_WORDS)
    print("all modes agree" if result.agree else "modes DISAGREE in the held-out loss")


STEP_COLUMNS = ("step, us", "interval", "speed", "fwd+bwd", "memory")
STEP_WORDS = (
    "speed: how many times as fast a step is as that of the first row\n"
    "fwd+bwd: the share of the step in forward, loss and backward; the optimizer has\n"
    "the rest"
)


def _step_cells(mode: ModeResult | OwnModeResult, first: ModeResult | OwnModeResult) -> list[str]:
    from fuselab.report.numbers import NONE, byte_count, digits, ratio, share

    part = mode.differentiate_us
    return [
        digits(mode.step_us),
        f"{digits(mode.low_us)} to {digits(mode.high_us)}",
        ratio(first.step_us / mode.step_us),
        NONE if part is None else share(min(part / mode.step_us, 1.0)),
        byte_count(mode.peak_bytes),
    ]


def _parts(mode: ModeResult | OwnModeResult) -> dict[str, float]:
    """Return the parts of a step for the picture."""
    if mode.differentiate_us is None:
        return {"one CUDA graph": mode.step_us}
    part = min(mode.differentiate_us, mode.step_us)
    return {"forward, loss, backward": part, "optimizer": mode.step_us - part}
