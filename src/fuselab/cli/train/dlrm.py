"""``fuselab train dlrm``: a DLRM on Criteo's layout, eager, compiled or fused."""

from __future__ import annotations

import os
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fuselab.cli.options import FILE, FOLDER, Json, call_of, flag, option
from fuselab.report import standard_output
from fuselab.report.progress import say

if TYPE_CHECKING:
    import torch

    from fuselab.distributed.ranks import Ranks
    from fuselab.train.dlrm import Plan
    from fuselab.train.dlrm_ranks import RankRun


def add(verbs: typer.Typer) -> None:
    """Register the model."""
    verbs.command("dlrm")(dlrm)


def dlrm(
    context: typer.Context,
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
    gpus: Annotated[int | None, option("Train on so many GPUs of this machine.", "N")] = None,
    ranks: Annotated[int | None, option("Train in so many processes.", "N")] = None,
    sharding: Annotated[
        str, option("planned, table, column, row or replicated: where tables are.")
    ] = "planned",
    plan_file: Annotated[Path | None, option("Take this sharding plan.", "FILE", "--plan")] = None,
    save_plan: Annotated[
        Path | None, option("Write the sharding plan as JSON.", "FILE", click_type=FILE)
    ] = None,
    exchange: Annotated[
        str | None,
        option("float32, bfloat16 or float16: vectors sent; default with --amp: bfloat16."),
    ] = None,
    table_memory: Annotated[
        float | None, option("GB that each rank has for tables; default: enough.", "GB")
    ] = None,
    json: Json = None,
) -> None:
    """Train a DLRM and score it on held-out rows.

    Ctrl-C writes a checkpoint and ends with status 130. Exit status 1: --check-gradients found the
    mode's gradients to be wrong; nothing was trained then. With --gpus or --ranks, or started by
    torchrun, the tables are shared out; --batch-size counts the rows of all ranks together.
    """
    if gpus is not None or ranks is not None:
        with standard_output.given_back():
            status = _launched(context, gpus, ranks, device)
        raise typer.Exit(status)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    import torch

    from fuselab.device.select import select
    from fuselab.distributed.ranks import joined, launched, spoken
    from fuselab.errors import ArgumentError
    from fuselab.models.dlrm_config import describe
    from fuselab.train.allocation import keep_freed_memory
    from fuselab.train.dlrm import Plan

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

    asked = _Asked(
        plan, folder, scalars, checkpoint_every, check_gradients, resume, profile, save_plan, json
    )
    spread = _Spread(sharding, plan_file, exchange or ("bfloat16" if amp else None), table_memory)
    if not launched():
        spread.refuse(save_plan)
        return _train(asked, where, None)
    with joined(where) as mine, spoken(mine):
        _train(asked, where, _ranked(asked, spread, mine))
    return None


@dataclass(frozen=True)
class _Asked:
    """The run that a call asks for, its files included."""

    plan: Plan
    folder: Path | None
    scalars: Path | None
    checkpoint_every: int
    check_gradients: bool
    resume: bool
    profile: bool
    save_plan: Path | None
    json: Path | None


@dataclass(frozen=True)
class _Spread:
    """The options that only a run of several ranks has."""

    sharding: str
    plan: Path | None
    exchange: str | None
    table_memory: float | None

    def refuse(self, save_plan: Path | None) -> None:
        """Raise ArgumentError if one of them was given to a run of one process."""
        from fuselab.errors import ArgumentError

        for name, value, default in (
            ("sharding", self.sharding, "planned"),
            ("plan", self.plan, None),
            ("save-plan", save_plan, None),
            ("table-memory", self.table_memory, None),
        ):
            if value != default:
                raise ArgumentError(
                    f"--{name} is for several ranks; add --gpus N or --ranks N, or start this with "
                    "torchrun."
                )


def _launched(
    context: typer.Context, gpus: int | None, ranks: int | None, device: str | None
) -> int:
    """Start torchrun's launcher with this call as every rank; return the status of them all."""
    from fuselab.distributed.launch import check_count, check_gpus, launch
    from fuselab.distributed.ranks import launched
    from fuselab.errors import ArgumentError

    if launched():
        raise ArgumentError(
            "--gpus and --ranks start processes, and torchrun has started this one; leave them out."
        )
    if gpus is not None and ranks is not None:
        raise ArgumentError("--gpus and --ranks both say how many; give one of them.")
    words = call_of(context, without=("gpus", "ranks"))
    if gpus is None:
        assert ranks is not None
        check_count("--ranks", ranks)
        return launch(words, ranks)
    check_count("--gpus", gpus)
    if device not in (None, "auto", "cuda"):
        raise ArgumentError(f"--gpus trains on GPUs, and --device is {device}; leave one out.")
    check_gpus(gpus)
    return launch(
        [*call_of(context, without=("gpus", "ranks", "device")), "--device", "cuda"], gpus
    )


def _ranked(asked: _Asked, spread: _Spread, mine: Ranks) -> RankRun:
    """Return this rank's run; rank 0 prints the plan."""
    from fuselab.distributed import planner
    from fuselab.errors import ArgumentError
    from fuselab.report.plan_text import plan_text
    from fuselab.train.allocation import enough_memory
    from fuselab.train.dlrm_ranks import RankRun, Sharding

    if asked.check_gradients:
        raise ArgumentError("--check-gradients works in one process; leave out --gpus and --ranks.")
    sharding = Sharding(
        spread.sharding, spread.plan, spread.exchange or "float32", spread.table_memory
    )
    with enough_memory("use more ranks, or smaller tables"):
        run = RankRun(asked.plan, mine.device, asked.folder, mine, sharding)
    if mine.first:
        print(plan_text(planner.facts(run.sharding_plan, run.demand(), sharding.bandwidths)))
        if asked.save_plan is not None:
            run.sharding_plan.write(asked.save_plan)
    return run


def _train(asked: _Asked, where: torch.device, ranked: RankRun | None) -> None:
    """Train, print the result and write it; with ranks, the first one prints and writes."""
    from fuselab.errors import CheckpointError
    from fuselab.report.result import write_result
    from fuselab.report.train_text import gradients_text, train_text
    from fuselab.train.allocation import enough_memory
    from fuselab.train.checkpoint import latest, own_folder
    from fuselab.train.dlrm import Run
    from fuselab.train.dlrm_gradients import compare
    from fuselab.train.events import Events

    plan, folder = asked.plan, asked.folder
    first = ranked is None or ranked.ranks.first
    alone = own_folder(folder) if folder is not None and first else nullcontext()
    with alone, enough_memory("give a smaller --batch-size, or narrower layers and smaller tables"):
        newest = latest(folder) if folder is not None and first else None
        if newest is not None and not asked.resume:
            raise CheckpointError(
                f"{newest} is there already; add --resume to go on from it, or keep this run in "
                "another folder."
            )
        run = Run(plan, where, folder) if ranked is None else ranked
        facts: dict[str, Any] = {}
        if asked.check_gradients:
            compared = compare(run)
            print(gradients_text(compared))
            facts["gradients"] = compared
            if not all(each["right"] for each in compared):
                raise typer.Exit(1)
        if asked.resume:
            run.resume()
            if first and run.begin:
                say(f"going on from step {run.begin:,} of {run.last}")
            elif first:
                say(f"{folder} holds no checkpoint: starting anew")
        if first and run.begin < run.steps:
            on = where.type if ranked is None else f"{ranked.ranks.world_size} x {where.type}"
            say(
                f"{run.steps - run.begin:,} steps of {plan.batch_size:,} rows on {on}, "
                f"{run.batches_per_epoch:,} an epoch; --steps N takes fewer"
            )
        events = Events(asked.scalars if first else None, run.begin)
        try:
            if asked.profile and first:
                from fuselab.inspect.profile import profile as recorder
                from fuselab.report.profile_text import profile_text

                with recorder((5, 1, 3, 1), name="train dlrm") as recording:
                    trained = run.train(asked.checkpoint_every, events, recording.step)
                if recording.recorded:
                    facts["profile"] = recording.result.describe()
                    print(profile_text(facts["profile"]))
                else:
                    say("fuselab: too few steps to profile: it takes 7.")
            else:
                trained = run.train(asked.checkpoint_every, events)
        finally:
            events.close()
    if first:
        facts |= run.describe(trained)
        print(train_text(facts))
        write_result(asked.json, "train dlrm", facts, where)
    if trained.course.interrupted:
        kept = (
            "nothing is kept, for want of --checkpoint"
            if trained.checkpoint is None
            else f"{trained.checkpoint} is written, and --resume goes on from it"
        )
        if first:
            done = f"{trained.course.steps:,} of {trained.steps:,}"
            say(f"fuselab: stopped behind step {done}; {kept}.")
        raise typer.Exit(130)
