"""Whether the modes train alike: loss curves of every mode over seeds, and their spread.

    python benchmarks/dlrm_parity.py [--config main|small|FILE] [--data P] [--steps 2000]
                                     [--mode eager ...] [--seeds 3] [--amp] [--json F] [--plot F]

A seed decides the weights and the order of rows. A mode agrees where its held-out loss differs from
eager's of the same seed by no more than eager's own seeds differ from each other; status 1 where
one does not.
"""

from __future__ import annotations

import argparse
import io
import sys
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch

from fuselab.device.environment import describe as environment
from fuselab.device.select import select
from fuselab.models.dlrm_config import describe
from fuselab.report.files import replacing, write_json
from fuselab.report.plots import COLORS, check_suffix
from fuselab.train.allocation import keep_freed_memory
from fuselab.train.dlrm import Plan, Run
from fuselab.train.dlrm_modes import MODES

Found = dict[str, dict[int, dict[str, Any]]]  # by mode and seed: what ``Run.describe`` gives


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", default="main")
    parser.add_argument("--data")
    parser.add_argument("--rows", type=int, default=1_000_000, help="synthetic, without --data")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--optimizer", default="sgd")
    parser.add_argument("--mode", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--amp", action="store_true", help="products in bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds is 2 or more: their spread is what a mode is held against")
    device = select(options.device)
    if options.plot is not None:
        check_suffix(options.plot)
    if device.type == "cuda":
        torch.set_float32_matmul_precision("high")
    else:
        keep_freed_memory()
    found: Found = {mode: {} for mode in options.mode}
    for seed in range(options.seeds):
        for mode in options.mode:
            plan = Plan(
                describe(options.config).config,
                mode,
                data=options.data,
                rows=options.rows,
                batch_size=options.batch_size,
                steps=options.steps,
                optimizer=options.optimizer,
                lr=options.lr,
                half=options.amp,
                seed=seed,
            )
            run = Run(plan, device)
            with redirect_stderr(io.StringIO()):  # the progress of runs of seconds
                found[mode][seed] = run.describe(run.train())
            held_out = found[mode][seed]["held_out"]
            print(
                f"{mode:8} seed {seed}: held-out loss {held_out['loss']:.5f}, accuracy "
                f"{held_out['accuracy']:.4f}, AUC {held_out['auc']:.4f}, "
                f"{found[mode][seed]['rows_per_s']:,.0f} rows/s",
                flush=True,
            )
    agree = judge(found)
    if options.json is not None:
        runs = {
            mode: {str(seed): facts for seed, facts in of_mode.items()}
            for mode, of_mode in found.items()
        }
        write_json(options.json, {"environment": environment(device), "runs": runs})
    if options.plot is not None:
        plot(found, options.plot)
    return 0 if agree else 1


def judge(found: Found) -> bool:
    """Print every mode's largest difference from eager beside the spread of eager's seeds."""
    if "eager" not in found:
        return True
    losses = {
        mode: {seed: facts["held_out"]["loss"] for seed, facts in runs.items()}
        for mode, runs in found.items()
    }
    eager = losses.pop("eager")
    spread = max(eager.values()) - min(eager.values())
    agree = True
    for mode, own in losses.items():
        worst = max(abs(own[seed] - eager[seed]) for seed in own)
        agree = agree and worst <= spread
        print(f"{mode} differs from eager by {worst:.2g} at most; eager's seeds by {spread:.2g}")
    return agree


def plot(found: Found, path: Path) -> None:
    """The training loss of every mode, a curve per seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    styles = dict(zip(found, ("-", "--", ":"), strict=False))
    for (mode, runs), color in zip(found.items(), COLORS, strict=False):
        for seed, facts in runs.items():
            steps, losses = zip(*facts["curve"], strict=True)
            label = mode if seed == 0 else None
            axis.plot(steps, losses, styles[mode], color=color, label=label, linewidth=1.2)
    axis.set(xlabel="step", ylabel="training loss, mean of 50 steps")
    axis.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150)
    pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
