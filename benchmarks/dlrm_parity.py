"""Whether the modes train alike: loss curves of every mode over seeds, and their spread.

    python benchmarks/dlrm_parity.py [--config main|small|FILE] [--data P] [--steps 2000]
                                     [--mode compile fused] [--precision fp32 bf16] [--seeds 3]
                                     [--json F] [--plot F]

A seed decides the weights and the order of rows. A mode agrees if its held-out loss differs from
eager's of the same seed (in fp32; on a GPU with tf32 products, as every fp32 here) by no more than
eager's own seeds differ from each other. The last line says so; the exit status is 1 if one does
not. Without ``--data`` synthetic rows with a planted signal are prepared first (and removed). On a
GPU seeds run side by side, a process each.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr
from dataclasses import replace
from itertools import cycle, repeat
from pathlib import Path
from typing import Any

import torch

from fuselab.data import Modulus
from fuselab.data.prepare import prepare
from fuselab.data.synthetic import Synthetic
from fuselab.device.environment import describe as environment
from fuselab.device.select import select
from fuselab.models.dlrm_config import describe
from fuselab.report.files import replacing, write_json
from fuselab.report.plots import COLORS, check_plot
from fuselab.train.allocation import keep_freed_memory
from fuselab.train.dlrm import Plan, Run

EAGER = "eager fp32"
Found = dict[str, dict[int, dict[str, Any]]]  # results of ``Run.describe``, by way and seed


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="main")
    parser.add_argument("--data", help="a prepared folder")
    parser.add_argument("--rows", type=int, default=5_000_000, help="synthetic, without --data")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=2048)
    # At 1.0, float32's rounding alone grows to 0.02 of the loss in 200 steps, so no modes would
    # agree.
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mode", nargs="+", default=["compile", "fused"])
    parser.add_argument("--precision", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds is 2 or more: their spread is what a mode is held against")
    device = select(options.device)
    if options.plot is not None:
        check_plot(options.plot)
    begin = time.monotonic()
    ways = [EAGER, *(f"{mode} {as_}" for mode in options.mode for as_ in options.precision)]
    with tempfile.TemporaryDirectory() as made:
        data = options.data or prepared(made, options.config, options.rows)
        plan = Plan(
            describe(options.config).config,
            data=data,
            batch_size=options.batch_size,
            steps=options.steps,
            optimizer=options.optimizer,
            lr=options.lr,
        )
        fresh = multiprocessing.get_context("spawn")
        at_once = options.seeds if device.type == "cuda" else 1
        with ProcessPoolExecutor(at_once, mp_context=fresh) as pool:
            of_seeds = pool.map(
                trained, repeat(plan), repeat(ways), range(options.seeds), repeat(device)
            )
            found: Found = {way: {} for way in ways}
            for seed, runs in enumerate(of_seeds):
                for way, facts in runs.items():
                    found[way][seed] = facts
    print(f"{time.monotonic() - begin:.0f} s in all")
    agree = judge(found)
    if options.json is not None:
        runs = {
            way: {str(seed): facts for seed, facts in of_way.items()}
            for way, of_way in found.items()
        }
        write_json(options.json, {"environment": environment(device), "runs": runs})
    if options.plot is not None:
        plot(found, options.plot)
    return 0 if agree else 1


def prepared(folder: str, config: str, rows: int) -> str:
    """Prepare synthetic rows for the configuration; return their folder."""
    sizes = describe(config).config.table_sizes
    prepare(Synthetic(rows), Path(folder) / "rows", ids=Modulus(sizes))
    return str(Path(folder) / "rows")


def trained(
    plan: Plan, ways: Sequence[str], seed: int, device: torch.device
) -> dict[str, dict[str, Any]]:
    """Train every way with one seed, in a separate process; return the results by way."""
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()
    found = {}
    for way in ways:
        mode, precision = way.split()
        run = Run(replace(plan, mode=mode, half=precision == "bf16", seed=seed), device)
        with redirect_stderr(io.StringIO()):  # hides the progress of runs of seconds
            found[way] = facts = run.describe(run.train())
        held_out = facts["held_out"]
        print(
            f"{way:12} seed {seed}: held-out loss {held_out['loss']:.5f}, accuracy "
            f"{held_out['accuracy']:.4f}, AUC {held_out['auc']:.4f}, "
            f"{facts['rows_per_s']:,.0f} rows/s",
            flush=True,
        )
        torch._dynamo.reset()  # compiled code keeps its model alive
    return found


def judge(found: Found) -> bool:
    """Print every way's largest difference from eager beside the spread of eager's seeds; return
    whether all are within it."""
    losses = {
        way: {seed: facts["held_out"]["loss"] for seed, facts in runs.items()}
        for way, runs in found.items()
    }
    eager = losses.pop(EAGER)
    spread = max(eager.values()) - min(eager.values())
    worst = {way: max(abs(own[seed] - eager[seed]) for seed in own) for way, own in losses.items()}
    for way, difference in worst.items():
        print(
            f"{way} differs from eager by {difference:.2g} at most; eager's seeds by {spread:.2g}"
        )
    agree = all(difference <= spread for difference in worst.values())
    print(f"within the spread of eager's seeds: {'yes' if agree else 'no'}")
    return agree


def plot(found: Found, path: Path) -> None:
    """Draw the training loss of every way, a curve per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles = cycle(("-", "--", ":"))
    for (way, runs), color, style in zip(found.items(), COLORS, styles, strict=False):
        for seed, facts in runs.items():
            steps, losses = zip(*facts["curve"], strict=True)
            label = way if seed == 0 else None
            axis.plot(steps, losses, style, color=color, label=label, linewidth=1.2)
    axis.set(xlabel="step", ylabel="training loss, mean of 50 steps")
    axis.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
