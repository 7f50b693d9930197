"""DLRM's training step on one GPU and on several: samples per second, and the exchange.

    python benchmarks/scale.py --gpus 1 2 [--case dot-65536-table ...] [--prove] [--json FILE]
                               [--device cuda] [--steps N] [--largest ROWS]

A case is INTERACTION-ROWS-SHARDING, such as ``dot-65536-planned``: rows per GPU, and a kind of
``fuselab train dlrm --sharding``; ``wide-ROWS-row`` has tables of 128 columns that exceed one GPU
(``--wide-gb`` says how much they take together). Every case runs in a fresh launch of torchrun,
in bfloat16 with vectors in bfloat16, ids uniform, batches already on the device. Modes: ``one`` is
``fuselab train dlrm --mode fused`` in one process, ``graph`` the fused step of several ranks in one
CUDA graph with its exchange, ``launched`` the same without a graph. Its peers (``scale_peers.py``)
run in the same launch: ``plain``, compiled PyTorch under DDP with row-wise tables, and on a CPU
``torchrec``, where that is installed.

``--prove`` also trains ``main`` through the command line on one GPU and on the most, compares the
loss curves, continues the checkpoint of several on one, and kills a rank.

It ends with one line per claim, which says yes or no. Exit status 1: one says no.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import scale_peers
import torch
import torch.distributed as dist
from torch import nn

from fuselab.data import Batch
from fuselab.data.layout import DENSE_COLUMNS, SPARSE_COLUMNS
from fuselab.device.environment import describe
from fuselab.distributed import planner
from fuselab.distributed.planner import Bandwidths, Demand
from fuselab.distributed.ranks import Ranks, joined
from fuselab.distributed.tables import ShardedTables
from fuselab.models.dlrm import MAIN, Dlrm, DlrmConfig
from fuselab.report.files import write_json
from fuselab.train.dlrm_modes import FusedStep
from fuselab.train.dlrm_ranks_step import Begun, rank_step_of

RATE = 0.1
CASES = ("dot-65536-table", "dot-65536-planned", "dot-65536-row", "dot-2048-table")
ROUNDS = 5
PEERS = ("plain", "torchrec")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--case", nargs="+", default=list(CASES))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100, help="steps of each of 5 rounds")
    parser.add_argument("--largest", type=int, default=2**31, help="rows of the largest table")
    parser.add_argument(
        "--wide-gb", type=float, default=164.0, help="bytes of a wide case's tables"
    )
    parser.add_argument("--wait", type=float, default=75.0, help="seconds that a launch may take")
    parser.add_argument("--prove", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work is not None:
        case, out = options.work
        with joined(torch.device(options.device)) as ranks:
            found = measure(case, ranks, options)
            if ranks.first:
                Path(out).write_text(json.dumps(found))
        return 0
    measured: list[dict[str, Any]] = []
    alone: set[str] = set()  # on one GPU all kinds of sharding are one
    for case in options.case:
        for count in options.gpus:
            what = case.rpartition("-")[0]
            if count == 1 and what in alone:
                continue
            if count == 1:
                alone.add(what)
            found = launched(case, count, options)
            measured.append({"case": case, "gpus": count, **found})
            show(measured[-1])
            _keep(options, measured, None)
    claims = scaling(measured)
    if options.prove:
        proved = prove(max(options.gpus), options)
        claims += proved["claims"]
        _keep(options, measured, proved)
    print()
    for claim, holds in claims:
        print(f"{'yes' if holds else 'NO '}  {claim}")
    return 0 if all(holds for _, holds in claims) else 1


def _keep(options: argparse.Namespace, measured: list[dict[str, Any]], proved: Any) -> None:
    if options.json is not None:  # written after every case
        facts = {"environment": describe(torch.device(options.device)), "measured": measured}
        write_json(options.json, {**facts, "proved": proved})


def launched(case: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what rank 0 of a launch measured, or the reason why there is nothing."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        words = [__file__, "--device", options.device, "--steps", str(options.steps)]
        words += ["--largest", str(options.largest), "--wide-gb", str(options.wide_gb)]
        said = _run(
            [
                sys.executable, "-m", "torch.distributed.run", "--standalone",
                "--nproc-per-node", str(count), *words, "--work", case, str(out),
            ],
            options.wait,
        )  # fmt: skip
        if out.exists():
            found: dict[str, Any] = json.loads(out.read_text())
            return found
        return {"error": said[-3000:]}


def _run(words: list[str], wait_s: float) -> str:
    """Run a command; return its output, whatever its end. After ``wait_s`` all of it is killed."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(wait_s)
        late = child.poll() is None
        for pid in [*_descendants(child.pid), child.pid] if late else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        output.seek(0)
        return output.read() + (f"\nkilled after {wait_s} s" if late else "")


def _descendants(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [*_descendants(child), child]
    return found


# --- one launch ----------------------------------------------------------------------------------


def config_of(interaction: str, options: argparse.Namespace) -> DlrmConfig:
    """Return the main configuration, or the wide one: 8 large tables of 128 columns."""
    if interaction == "wide":
        rows = int(options.wide_gb * 1e9 / (128 * 4) / 8)
        sizes = tuple(rows if place < 8 else 1000 for place in range(SPARSE_COLUMNS))
        return replace(
            MAIN, interaction="dot", embedding_dim=128, cardinalities=sizes, largest_table=rows
        )
    return replace(MAIN, interaction=interaction, largest_table=options.largest)


def measure(case: str, ranks: Ranks, options: argparse.Namespace) -> dict[str, Any]:
    interaction, rows_text, kind = case.split("-")
    rows, world = int(rows_text), ranks.world_size
    config = config_of(interaction, options)
    sizes = tuple((size, config.embedding_dim) for size in config.table_sizes)
    link = exchange_rates(ranks)
    demand = Demand(sizes, world, rows * world, vector_bytes=2)
    bandwidths = Bandwidths(link=link["all_to_all_bytes_per_s"] or Bandwidths().link)
    plan = (
        planner.choose(demand, bandwidths) if kind == "planned" else planner.uniform(demand, kind)
    )
    plan = type(plan).of(ranks.told(plan.describe()))
    counts = [rows] * world
    torch.manual_seed(0)
    batches = [_batch(config, rows, ranks, place) for place in range(4)]
    found: dict[str, Any] = {"device": _name(ranks.device), "link": link, "us": {}}
    facts = planner.facts(plan, demand, bandwidths)
    found["kinds"] = [each["kind"] for each in facts["tables"]]
    found["loads"] = facts["loads"]
    modes: dict[str, Callable[[], Callable[[int], object]]] = {}
    for name in ("graph", "launched") if ranks.device.type == "cuda" else ("launched",):
        modes[name] = lambda name=name: _ranked(  # type: ignore[misc]
            config, plan, ranks, counts, batches, name == "graph"
        )
    if world == 1 and interaction != "wide":
        modes["one"] = lambda: _alone(config, rows, ranks, batches)
    if interaction != "wide":
        modes["plain"] = lambda: scale_peers.plain(config, ranks, batches, RATE)
    if world > 1 and ranks.device.type == "cpu" and importlib.util.find_spec("torchrec"):
        modes["torchrec"] = lambda: scale_peers.torchrec(config, ranks, batches, RATE)
    for name, make in modes.items():
        try:
            step = make()
            found["us"][name], found["rounds"] = _timed(step, ranks, options.steps)
            if name not in ("launched", *PEERS) and ranks.device.type == "cuda":
                found[f"kernels_{name}"] = _kernels(step, ranks)
            found[f"memory_{name}"] = _memory(ranks.device)
            del step
        except Exception as error:  # the other modes are still worth timing
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:2000]
            if world > 1:
                break  # the ranks may have parted
        _free(ranks.device)
    return found


def _ranked(
    config: DlrmConfig,
    plan: Any,
    ranks: Ranks,
    counts: list[int],
    batches: list[Batch],
    graph: bool,
) -> Callable[[int], None]:
    tables = ShardedTables(plan, ranks, torch.bfloat16)
    with torch.no_grad():
        for _, parameter in tables.held():
            parameter.uniform_(-0.01, 0.01)
    torch.manual_seed(0)
    model = Dlrm(config, new_table=lambda rows, width: nn.Embedding(rows, width, device="meta"))
    for name, module in model.named_children():
        if name != "embeddings":
            module.to(ranks.device)
    step = rank_step_of("fused", model, tables, "sgd", counts, half=True, graph=graph)
    on_gpu = ranks.device.type == "cuda"
    beside = torch.cuda.Stream(ranks.device) if on_gpu else None
    ahead: list[Begun] = []

    def begin(place: int) -> None:
        batch = batches[place % len(batches)]
        if beside is None:
            ahead.append(Begun(batch, tables.ask(batch.sparse, counts)))
            return
        beside.wait_stream(torch.cuda.current_stream(ranks.device))
        with torch.cuda.stream(beside):
            ahead.append(Begun(batch, tables.ask(batch.sparse, counts)))

    def run(place: int) -> None:
        if not ahead:
            begin(place)
        current = ahead.pop(0)
        begin(place + 1)
        step(current, RATE)

    return run


def _alone(
    config: DlrmConfig, rows: int, ranks: Ranks, batches: list[Batch]
) -> Callable[[int], None]:
    def new_table(size: int, width: int) -> nn.Embedding:
        weight = torch.empty(size, width, device=ranks.device).uniform_(-0.01, 0.01)
        return nn.Embedding(size, width, _weight=weight)

    torch.manual_seed(0)
    model = Dlrm(config, new_table=new_table).to(ranks.device)
    step = FusedStep(model, "sgd", rows, half=True)
    return lambda place: void(step(batches[place % len(batches)], RATE))


def void(value: object) -> None:
    """Drop the value."""


def _batch(config: DlrmConfig, rows: int, ranks: Ranks, place: int) -> Batch:
    generator = torch.Generator(ranks.device).manual_seed(1000 * ranks.rank + place)
    at = {"generator": generator, "device": ranks.device}
    sizes = torch.tensor(config.table_sizes, dtype=torch.float64, device=ranks.device)
    uniform = torch.rand((rows, SPARSE_COLUMNS), dtype=torch.float64, **at)
    return Batch(
        torch.rand(rows, **at).round(),
        torch.rand((rows, DENSE_COLUMNS), **at) * 5,
        (uniform * sizes).int(),
    )


def _timed(step: Callable[[int], object], ranks: Ranks, steps: int) -> tuple[float, list[float]]:
    """Return the microseconds of a step: the median over rounds of the slowest rank's."""
    for place in range(10):
        step(place)
    taken = []
    for _ in range(ROUNDS):
        _synchronize(ranks.device)
        ranks.wait()
        begin = time.perf_counter()
        for place in range(steps):
            step(place)
        _synchronize(ranks.device)
        slowest = torch.tensor([time.perf_counter() - begin], device=ranks.device)
        if ranks.world_size > 1:
            dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        taken.append(slowest.item() / steps * 1e6)
    return median(taken), taken


def _kernels(step: Callable[[int], object], ranks: Ranks) -> list[tuple[str, float, float]]:
    """Return the kernels of a step with their microseconds and number, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for place in range(10):
            step(place)
        _synchronize(ranks.device)
    totals = recorded.key_averages()
    rows = [(each.key[:90], each.self_device_time_total / 10, each.count / 10) for each in totals]
    return sorted(rows, key=lambda row: -row[1])[:30]


def exchange_rates(ranks: Ranks) -> dict[str, float | None]:
    """Return what all_to_all and all_reduce reach, in bytes per second and direction and rank."""
    if ranks.world_size == 1:
        return {"all_to_all_bytes_per_s": None, "all_reduce_us_2MB": None}
    world = ranks.world_size
    size = (
        (64 << 20) // world * world if ranks.device.type == "cuda" else (1 << 20) // world * world
    )
    sent = torch.zeros(size, dtype=torch.uint8, device=ranks.device)
    received, small = torch.empty_like(sent), torch.zeros(500_000, device=ranks.device)
    calls = {
        "all_to_all": lambda: dist.all_to_all_single(received, sent),
        "all_reduce": lambda: dist.all_reduce(small),
    }
    seconds = {}
    for name, call in calls.items():
        for _ in range(3):
            call()
        _synchronize(ranks.device)
        begin = time.perf_counter()
        for _ in range(20):
            call()
        _synchronize(ranks.device)
        seconds[name] = (time.perf_counter() - begin) / 20
    crossing = size * (world - 1) / world  # what a rank sends to others
    return {
        "all_to_all_bytes_per_s": crossing / seconds["all_to_all"],
        "all_reduce_us_2MB": seconds["all_reduce"] * 1e6,
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _memory(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _free(device: torch.device) -> None:
    import gc

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# --- what is shown and claimed -------------------------------------------------------------------


def show(row: dict[str, Any]) -> None:
    rows = row["case"].split("-")[1]
    head = f"{row['case']:20} {row['gpus']} x"
    if "error" in row:
        print(f"{head} nothing: {row['error'][-1500:]}", flush=True)
        return
    for name, us in row["us"].items():
        rate = int(rows) * row["gpus"] / us * 1e6
        memory = row.get(f"memory_{name}")
        held = "" if memory is None else f"  {memory / 1e9:.1f} GB"
        print(f"{head} {name:9} {us:10.1f} us  {rate / 1e6:8.2f} M rows/s{held}", flush=True)
    for name, error in row.get("errors", {}).items():
        print(f"{head} {name:9} {error}", flush=True)
    rate = row["link"]["all_to_all_bytes_per_s"]
    if rate:
        print(f"{'':22} all_to_all {rate / 1e9:.1f} GB/s, all_reduce of 2 MB "
              f"{row['link']['all_reduce_us_2MB']:.1f} us", flush=True)  # fmt: skip


def scaling(measured: list[dict[str, Any]]) -> list[tuple[str, bool]]:
    """Return the claims about speed: 1.75 times one GPU's rate on 2, 3.3 on 4, 6.2 on 8, and
    nowhere slower than a peer."""
    claims = []
    for row in measured:
        claims += _beside_peers(row)
        wanted = {2: 1.75, 4: 3.3, 8: 6.2}.get(row["gpus"])
        one = [
            us
            for other in measured
            if other["gpus"] == 1 and other["case"].split("-")[:2] == row["case"].split("-")[:2]
            for name, us in other.get("us", {}).items()
            if name not in PEERS
        ]
        mine = row.get("us", {})
        if wanted is None or not mine or not one or "-65536-" not in row["case"]:
            continue
        mine = {name: us for name, us in mine.items() if name not in PEERS}
        name = min(mine, key=mine.__getitem__)
        reached = row["gpus"] * min(one) / mine[name]
        claims.append(
            (
                f"{row['case']}: {row['gpus']} GPUs ({name}) give {reached:.2f} x the rows per "
                f"second of one; wanted {wanted}",
                reached >= wanted,
            )
        )
    return claims


def _beside_peers(row: dict[str, Any]) -> list[tuple[str, bool]]:
    us = row.get("us", {})
    ours = min((us[name] for name in us if name not in PEERS), default=None)
    return [
        (
            f"{row['case']} on {row['gpus']}: our step takes {ours:.0f} us, that of '{name}' "
            f"{us[name]:.0f}",
            ours <= us[name],
        )
        for name in PEERS
        if ours is not None and name in us
    ]


def prove(count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train by the command line on one GPU and on several; return the facts and the claims."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        curves = {
            str(each): _cli(folder, f"kept-{each}", each, 100, options)
            for each in sorted({1, count})
        }
        first, last = curves["1"], curves[str(count)]
        off = max(
            (abs(a[1] - b[1]) / a[1] for a, b in zip(first["curve"], last["curve"], strict=False)),
            default=float("nan"),
        )
        moved = _cli(folder, f"kept-{count}", 1, 150, options, "--resume")
        seconds, said = _kill(folder, count, options)
    lines = [line for line in said.splitlines() if line.startswith("fuselab: rank")]
    claims = [
        (f"the loss curves of 1 and {count} GPUs differ by {off:.1e}", off < 1e-3),
        (
            f"the checkpoint of {count} GPUs goes on with 1 from step {moved['resumed_from']}",
            moved["resumed_from"] == 100 and moved["steps"] == 150,
        ),
        (
            f"{seconds:.1f} s after kill -9 of rank 1 all ranks had ended: {' '.join(lines)}",
            seconds < 30 and "rank 1" in " ".join(lines),
        ),
    ]
    return {
        "claims": claims, "curves": curves, "resumed": moved, "kill_s": seconds, "kill_said": said,
    }  # fmt: skip


def _words(count: int, steps: int, options: argparse.Namespace) -> list[str]:
    where = ["--gpus", str(count)] if options.device == "cuda" else ["--ranks", str(count)]
    rows = ["--rows", "400000", "--batch-size", "8192"]
    if options.device != "cuda":
        rows = ["--rows", "20000", "--batch-size", "64", "--device", "cpu"]
    return [
        sys.executable, "-m", "fuselab", "train", "dlrm", "--config", "main", *where, *rows,
        "--steps", str(steps), "--deterministic",
    ]  # fmt: skip


def _cli(
    folder: Path, kept: str, count: int, steps: int, options: argparse.Namespace, *more: str
) -> dict[str, Any]:
    out = folder / "out.json"
    out.unlink(missing_ok=True)
    words = [*_words(count, steps, options), "--checkpoint", str(folder / kept), "--json", str(out)]
    said = _run([*words, *more], options.wait)
    if not out.exists():
        print(said[-3000:])
        return {"curve": [], "resumed_from": None, "steps": None, "said": said[-3000:]}
    found = json.loads(out.read_text())
    return {key: found[key] for key in ("curve", "resumed_from", "steps", "held_out", "rows_per_s")}


def _kill(folder: Path, count: int, options: argparse.Namespace) -> tuple[float, str]:
    """Kill a rank in the middle of a run; return the seconds until all had ended, and the text."""
    log = folder / "killed.txt"
    words = [*_words(count, 10_000_000, options), "--epochs", "1000000"]
    words += ["--checkpoint", str(folder / "killed"), "--checkpoint-every", "20"]
    with log.open("w") as output:
        child = subprocess.Popen(words, stdout=output, stderr=output, start_new_session=True)
        deadline = time.monotonic() + options.wait
        while not list((folder / "killed").glob("step-*")) and time.monotonic() < deadline:
            if child.poll() is not None:
                return float("nan"), log.read_text()
            time.sleep(0.05)
        for pid in _descendants(child.pid):
            if _rank(pid) == "1":
                os.kill(pid, signal.SIGKILL)
        begin = time.monotonic()
        everyone = _descendants(child.pid)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(options.wait)
        seconds = time.monotonic() - begin
        for pid in everyone:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                seconds = float("nan")  # one was left over
    return seconds, log.read_text()[-3000:]


def _rank(pid: int) -> str | None:
    """Return the rank of a process, from its environment; None for a helper of a rank."""
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"fuselab" not in words:
            return None
        for entry in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            if entry.startswith(b"RANK="):
                return entry[5:].decode()
    return None


if __name__ == "__main__":
    sys.exit(main())
