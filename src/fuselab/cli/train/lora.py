"""``fuselab train lora``: adapters on handwritten digits, eager, compiled and fused, compared."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fuselab.cli.options import Device, Json, flag, option, output_option
from fuselab.report.progress import say
from fuselab.report.screen import table

if TYPE_CHECKING:
    from fuselab.train.lora import LoraResult


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("lora")(lora)


def lora(
    mode: Annotated[
        list[str] | None, option("eager, compile or fused; repeatable; default all.", "MODE")
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
    device: Device = "auto",
    json: Json = None,
) -> int:
    """Train adapters on a frozen MLP, in every mode.

    The MLP knows the digits 0 to 4; the adapters learn 5 to 9. Every mode begins with the same
    weights and sees the same batches. Exit status 1: the modes reached different accuracies, or
    merging the adapters into the weights changed the accuracy.
    """
    from fuselab.device.select import select
    from fuselab.report.result import write_result
    from fuselab.train.lora import Settings, train
    from fuselab.train.lora_modes import MODES

    where = select(device)
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
    result = train(settings, where, output, lambda sentence: say(f"{sentence} ..."))
    _show(result)
    write_result(json, "train lora", {**asdict(result), "agree": result.agree}, where)
    return 0 if result.agree else 1


def _show(result: LoraResult) -> None:
    from fuselab.report.numbers import byte_count, digits

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
            digits(mode.step_us),
            f"{digits(mode.low_us)} to {digits(mode.high_us)}",
            byte_count(mode.peak_bytes),
        ]
        for mode in result.modes
    ]
    columns = ["mode", "loss", "5 to 9 right", "us per step", "interval", "memory"]
    print("\n".join(table(columns, rows, right=range(1, 6))))
    print(
        f"\nmerged: {result.merged_accuracy:.1%} right, logits off by at most "
        f"{result.merged_off:.2g}"
    )
    if result.exported is not None:
        print(f"exported: {result.exported}, read back into the base with the same weights")
    print("all modes agree" if result.agree else "modes DISAGREE in accuracy")
