"""``fuselab train dlrm``: a DLRM on Criteo's layout, eager, compiled or fused."""

from __future__ import annotations

import os
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from fuselab.cli.options import FOLDER, Json, flag, option
from fuselab.report.progress import say


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("dlrm")(dlrm)


def dlrm(
    config: Annotated[
        str, option("A built-in model, or a TOML or JSON file.", "small|main|FILE")
    ] = "small",
    data: Annotated[
        str | None, option("Prepared or raw rows; default: synthetic ones.", "P")
    ] = None,
    validation: Annotated[
        str | None, option("Rows to hold out; default: some of --data.", "P")
    ] = None,
    metadata: Annotated[
        str | None, option("Vocabularies or cardinalities of raw rows.", "FILE")
    ] = None,
    rows: Annotated[int, option("How many synthetic rows, without --data.")] = 1_000_000,
    mode: Annotated[str, option("eager, compile or fused.")] = "fused",
    batch_size: Annotated[int | None, option("Rows of a batch.")] = None,
    steps: Annotated[int | None, option("Stop after so many steps.")] = None,
    epochs: Annotated[int | None, option("Stop after so many passes; 1 without --steps.")] = None,
    optimizer: Annotated[str | None, option("sgd, adagrad (row-wise), adam.")] = None,
    lr: Annotated[float | None, option("Learning rate; default: 0.1.")] = None,
    warmup: Annotated[int | None, option("Steps of linear warm-up; default: 0.")] = None,
    decay: Annotated[
        float | None, option("Power of the decay to 0 after the warm-up; default: 0, none.")
    ] = None,
    amp: Annotated[bool, flag("--amp", "Products in bfloat16.")] = False,
    seed: Annotated[int | None, option("Seed of the weights and the order of rows.")] = None,
    deterministic: Annotated[
        bool, flag("--deterministic", "The same weights in every run, bit for bit.")
    ] = False,
    check_gradients: Annotated[
        bool, flag("--check-gradients", "Compare the mode's gradients with float64's first.")
    ] = False,
    checkpoint: Annotated[Path | None, option("Keep checkpoints there.", "DIR")] = None,
    checkpoint_every: Annotated[
        int, option("Steps between two checkpoints; 0: only at the end.")
    ] = 1000,
    resume: Annotated[bool, flag("--resume", "Go on from the newest checkpoint.")] = False,
    tensorboard: Annotated[
        Path | None, option("Write scalars for TensorBoard.", "DIR", click_type=FOLDER)
    ] = None,
    profile: Annotated[bool, flag("--profile", "Show where the time of some steps goes.")] = False,
    device: Annotated[str | None, option("auto, cpu, cuda or cuda:N.")] = None,
    json: Json = None,
) -> None:
    """Train a DLRM and score it on held-out rows.

    Ctrl-C writes a checkpoint and ends with status 130. Exit status 1: --check-gradients found the
    mode's gradients to be wrong; nothing was trained then.
    """
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    from fuselab.device.select import select
    from fuselab.errors import ArgumentError, CheckpointError
    from fuselab.models.dlrm_config import describe
    from fuselab.report.result import write_result
    from fuselab.report.train_text import gradients_text, train_text
    from fuselab.train.allocation import enough_memory, keep_freed_memory
    from fuselab.train.checkpoint import latest, own_folder
    from fuselab.train.dlrm import Plan, Run
    from fuselab.train.dlrm_gradients import compare
    from fuselab.train.events import Events

    described = describe(config)
    said = described.settings
    given = {
        "data": data,
        "validation": validation,
        "metadata": metadata,
        "batch_size": batch_size,
        "steps": steps,
        "epochs": epochs,
        "optimizer": optimizer,
        "lr": lr,
        "warmup": warmup,
        "decay": decay,
        "seed": seed,
    }
    chosen = {
        name: getattr(said, name) if value is None else value for name, value in given.items()
    }
    if epochs is not None:
        chosen["steps"] = steps  # the command line's epochs replace a file's steps
    known: dict[str, Any] = {name: value for name, value in chosen.items() if value is not None}
    plan = Plan(described.config, mode, rows=rows, half=amp, **known)
    where = select(device or said.device or "auto")
    folder = checkpoint or (None if said.checkpoint is None else Path(said.checkpoint))
    scalars = tensorboard or (None if said.tensorboard is None else Path(said.tensorboard))
    if folder is None and resume:
        raise ArgumentError("--resume goes on from a checkpoint; say where with --checkpoint DIR.")
    if checkpoint_every < 0:
        raise ArgumentError(f"--checkpoint-every is {checkpoint_every}; give 0 or more.")
    if deterministic:
        torch.use_deterministic_algorithms(True)
    if where.type == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()

    alone = nullcontext() if folder is None else own_folder(folder)
    with alone, enough_memory("give a smaller --batch-size, or narrower layers and smaller tables"):
        newest = None if folder is None else latest(folder)
        if newest is not None and not resume:
            raise CheckpointError(
                f"{newest} is there already; add --resume to go on from it, or keep this run in "
                "another folder."
            )
        run = Run(plan, where, folder)
        facts: dict[str, Any] = {}
        if check_gradients:
            compared = compare(run)
            print(gradients_text(compared))
            facts["gradients"] = compared
            if not all(each["right"] for each in compared):
                raise typer.Exit(1)
        if resume:
            run.resume()
            if run.begin:
                say(f"going on from step {run.begin:,} of {run.last}")
            else:
                say(f"{folder} holds no checkpoint: starting anew")
        if run.begin < run.steps:
            say(
                f"{run.steps - run.begin:,} steps of {plan.batch_size:,} rows on {where.type}, "
                f"{run.batches_per_epoch:,} an epoch; --steps N takes fewer"
            )
        events = Events(scalars, run.begin)
        try:
            if profile:
                from fuselab.inspect.profile import profile as recorder
                from fuselab.report.profile_text import profile_text

                with recorder((5, 1, 3, 1), name="train dlrm") as recording:
                    trained = run.train(checkpoint_every, events, recording.step)
                if recording.recorded:
                    facts["profile"] = recording.result.describe()
                    print(profile_text(facts["profile"]))
                else:
                    say("fuselab: too few steps to profile: it takes 7.")
            else:
                trained = run.train(checkpoint_every, events)
        finally:
            events.close()
    facts |= run.describe(trained)
    print(train_text(facts))
    write_result(json, "train dlrm", facts, where)
    if trained.course.interrupted:
        kept = (
            "nothing is kept, for want of --checkpoint"
            if trained.checkpoint is None
            else f"{trained.checkpoint} is written, and --resume goes on from it"
        )
        say(f"fuselab: stopped behind step {trained.course.steps:,} of {trained.steps:,}; {kept}.")
        raise typer.Exit(130)
