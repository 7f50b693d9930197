"""How many rows a second the loader gives from prepared files: alone, and behind a training step.

    python benchmarks/loader.py [--device cuda] [--data FOLDER] [--rows N] [--batch B ...]

Without ``--data`` a folder of random records is made first (and removed), as large as ``--rows``
says; it lies in the page cache then. "given" takes batches as fast as they come, each copied into
tensors that stay, as a captured step needs them; "in order" does so without a shuffle. On a GPU,
"step" lets the device work a fixed time on every batch and tells how much longer a batch takes than
that: what the loader costs a step that is as fast as the target. The parts (read, order) say which
of them is the limit.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import torch

from fuselab.data import KAGGLE_CARDINALITIES, Loader, open_dataset
from fuselab.data.loader import READERS
from fuselab.data.prepared import SCHEMA, Prepared
from fuselab.data.records import RECORD, Batch
from fuselab.data.shuffle import permutation
from fuselab.device import environment
from fuselab.report.files import write_json

WINDOW = 1 << 20
SECONDS = 2.0  # per figure
STEP_US = 1200  # the fused step's target at a batch of 65536
NEEDED = 1.2  # times the rate of that step


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="a prepared folder")
    parser.add_argument("--rows", type=int, default=8 << 20, help="random rows, 160 bytes each")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 2048, 65536])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.data or random_records(Path(made), options.rows)
        figures = dict(parts(folder))
        for batch in options.batch:
            figures.update(loaded(folder, batch, options.device))
    for name, figure in figures.items():
        print(f"{name:50} {figure:14,.1f}")
    needed = NEEDED * 65536 / STEP_US
    print(f"needed at 65536: {NEEDED} x the rate of a step of {STEP_US} us, {needed:.1f} M rows/s")
    if options.json:
        facts = {"schema": 1, "environment": environment.describe(), "rows": options.rows}
        write_json(options.json, {**facts, "figures": figures})


def random_records(folder: Path, rows: int) -> Path:
    """A prepared folder whose shards are copies of one."""
    some = numpy.random.default_rng(0)
    shard = numpy.empty(min(rows, WINDOW), RECORD)
    shard["dense"] = some.random((len(shard), 13), dtype=numpy.float32)
    shard["label"] = some.random(len(shard)) < 0.25
    for column, size in enumerate(KAGGLE_CARDINALITIES):
        shard["sparse"][:, column] = some.integers(0, size, len(shard))
    shards = []
    for number, first in enumerate(range(0, rows, len(shard))):
        held = shard[: rows - first]
        numpy.save(folder / f"rows-{number}.npy", held)
        shards.append({"file": f"rows-{number}.npy", "rows": len(held)})
    manifest = {
        "schema": SCHEMA,
        "cardinalities": KAGGLE_CARDINALITIES,
        "validation_first": rows,
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def parts(folder: Path) -> Iterator[tuple[str, float]]:
    """Millions of rows a second that the steps of a window can do, each alone."""
    prepared = Prepared(folder)
    rows = min(prepared.rows, WINDOW)
    records = numpy.zeros(rows, RECORD)
    step = -(-rows // (2 * READERS))
    cuts = range(0, rows, step)
    with ThreadPoolExecutor(READERS) as pool:

        def read() -> None:
            list(pool.map(lambda cut: prepared.read_into(records[cut : cut + step], cut), cuts))

        yield f"read, {READERS} threads (M rows/s)", rows / seconds(read) / 1e6
    yield "read, 1 thread (M rows/s)", rows / seconds(lambda: prepared.read_into(records, 0)) / 1e6
    yield "order, 1 thread (M rows/s)", rows / seconds(lambda: permutation(rows, (1,))) / 1e6


def loaded(folder: Path, batch: int, device: str) -> Iterator[tuple[str, float]]:
    data = open_dataset(folder)
    cuda = torch.device(device).type == "cuda"
    if data.rows < batch:
        return
    for name, window in (("in order", 0), ("given", WINDOW)):
        loader = Loader(data, batch, shuffle_window=window, device=device, drop_last=True)
        per_batch, _ = consumed(loader, cuda, 0.0)
        yield f"{batch}: {name} (M rows/s)", batch / per_batch / 1e6
        if window and cuda:
            for step_us in (batch / 65536 * STEP_US, batch / 65536 * STEP_US / NEEDED):
                per_batch, alone = consumed(loader, cuda, step_us * 1e-6)
                extra = 1e6 * (per_batch - alone)
                yield f"{batch}: over a step of {1e6 * alone:.0f} us (us)", extra


def consumed(loader: Loader, cuda: bool, step_s: float) -> tuple[float, float]:
    """Seconds a batch, and of the device's work alone, with ``step_s`` of it on each."""
    wait = torch.cuda.synchronize if cuda else lambda: None
    cycles = int(step_s * cycles_per_second()) if step_s else 0
    batches = endless(loader)
    kept = Batch(*(part.clone(memory_format=torch.contiguous_format) for part in next(batches)))

    def step(batch: Batch) -> None:
        for mine, given in zip(kept, batch, strict=True):
            mine.copy_(given, non_blocking=True)
        if cycles:
            torch.cuda._sleep(cycles)

    for _ in range(max(2 * WINDOW // loader.batch_size, 4)):  # every buffer is allocated
        step(next(batches))
    wait()
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < SECONDS:
        for _ in range(16):
            step(next(batches))
        count += 16
        if cycles:  # else the host would queue work without end
            wait()
    wait()
    per_batch = (time.perf_counter() - start) / count
    start = time.perf_counter()
    for number in range(1, 65):
        step(kept)
        if cycles and number % 16 == 0:
            wait()
    wait()
    return per_batch, (time.perf_counter() - start) / 64


def endless(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader


def cycles_per_second() -> float:
    """Of ``torch.cuda._sleep``."""
    many = 100_000_000
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.cuda._sleep(many)
    torch.cuda.synchronize()
    return many / (time.perf_counter() - start)


def seconds(work: Callable[[], object]) -> float:
    """The median of some calls, the first left out."""
    work()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
