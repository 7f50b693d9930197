"""Kill ranks of a training run with SIGKILL, many times, and compare what it leaves.

    python tools/kill_ranks.py [--kills 20] [--ranks 2] [--seed 0]

Two runs train the same model with ``--deterministic`` to the same step. One is left alone. The
other is started by torchrun with elastic restarts, and a random rank of it is killed at a random
moment, again and again; each restart goes on from the last checkpoint. If a row was lost or seen
twice, the last checkpoints differ. Exit status 1: they differ, a restart failed, or the surviving
ranks were still there 30 s after a kill.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch

from fuselab.train import checkpoint

_CONFIG = """dense_mlp = "13-8-4"
prediction_mlp = "8-1"
interaction = "dot"
largest_table = 50
"""
_LIMIT_S = 30.0  # between a kill and the end of the other ranks
_PATIENCE_S = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4000, help="of the whole run")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tiny.toml").write_text(_CONFIG)
        log = folder / "killed.txt"
        slowest = disturb(folder, log, options)
        alone = _words(folder, "alone", options, restarts=0)
        subprocess.run(alone, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        differing = compare(folder / "alone", folder / "killed")
    print(f"slowest end of the other ranks after a kill: {slowest:.1f} s")
    print(f"tensors that differ from the run left alone: {differing or 'none'}")
    return 1 if differing or slowest > _LIMIT_S else 0


def _words(folder: Path, kept: str, options: argparse.Namespace, restarts: int) -> list[str]:
    return [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0",
        "--nproc-per-node", str(options.ranks), "--max-restarts", str(restarts),
        "--monitor-interval", "0.2", "-m", "fuselab", "train", "dlrm",
        "--config", str(folder / "tiny.toml"), "--device", "cpu", "--rows", "3000",
        "--epochs", "1000000", "--steps", str(options.steps), "--mode", "fused",
        "--checkpoint", str(folder / kept), "--checkpoint-every", "20", "--resume",
        "--deterministic",
    ]  # fmt: skip


def disturb(folder: Path, log: Path, options: argparse.Namespace) -> float:
    """Run with kills; return the longest time until the other ranks had ended, in seconds."""
    draw = random.Random(options.seed)
    words = _words(folder, "killed", options, restarts=options.kills)
    slowest = 0.0
    with log.open("w") as output:
        child = subprocess.Popen(words, stdout=output, stderr=output)
        for kill in range(options.kills):
            before = _newest(folder / "killed")
            ranks = _await_progress(child, folder / "killed", before, options.ranks, log)
            time.sleep(draw.random() * 2)
            victim = draw.randrange(options.ranks)
            step = _newest(folder / "killed")
            if child.poll() is not None:
                raise SystemExit(f"the run ended before kill {kill + 1}; give more --steps.")
            os.kill(ranks[victim], signal.SIGKILL)
            begin = time.monotonic()
            while _running(ranks.values()) and time.monotonic() - begin < _PATIENCE_S:
                time.sleep(0.05)
            took = time.monotonic() - begin
            slowest = max(slowest, took)
            print(
                f"kill {kill + 1:2}: rank {victim} behind step {step}, all ended in {took:.1f} s",
                flush=True,
            )
        if child.wait() != 0:
            raise SystemExit(f"the run ended with {child.returncode}:\n{log.read_text()[-3000:]}")
    return slowest


def _await_progress(
    child: subprocess.Popen[bytes], folder: Path, before: int, count: int, log: Path
) -> dict[int, int]:
    """Wait until a checkpoint newer than ``before`` lies there; return the ranks' processes."""
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline:
        if child.poll() is not None:
            raise SystemExit(f"the run ended with {child.returncode}:\n{log.read_text()[-3000:]}")
        found = {rank: pid for pid in _children(child.pid) if (rank := _rank(pid)) is not None}
        if len(found) == count and _newest(folder) > before:
            return found
        time.sleep(0.05)
    raise SystemExit(f"no new checkpoint in {_PATIENCE_S:.0f} s:\n{log.read_text()[-3000:]}")


def _newest(folder: Path) -> int:
    """Return the step of the newest checkpoint, or 0."""
    found = checkpoint.latest(folder) if folder.exists() else None
    return 0 if found is None else int(found.stem.removeprefix("step-"))


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, path.read_text().split())
    return found


def _rank(pid: int) -> int | None:
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return int(entry[5:])
    return None


def _running(pids: Iterable[int]) -> list[int]:
    """Return those of the processes that still run; a zombie does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z":
                found.append(pid)
    return found


def compare(alone: Path, killed: Path) -> list[str]:
    """Return the names of the tensors in which the last checkpoints differ, in any bit."""
    first, second = (checkpoint.load(folder, "dlrm") for folder in (alone, killed))
    if first.step != second.step or first.facts["position"] != second.facts["position"]:
        return [f"step {first.step} and {second.step}"]
    return [
        name
        for name, value in first.tensors.items()
        if not torch.equal(value, second.tensors[name])
    ]


if __name__ == "__main__":
    sys.exit(main())
