"""How many rows a second the loader gives from prepared files: alone, and before the fused step.

    python benchmarks/loader.py [--device cuda] [--data FOLDER] [--rows N] [--batch B ...]
                                [--largest ROWS] [--seconds S] [--json FILE]

Without ``--data`` a folder of ``--rows`` random records is made first (and removed); it is then in
the page cache. ``given`` takes batches as fast as they come, each copied into tensors that stay;
``in order`` does so without a shuffle. ``step`` is the fused training step of DLRM's main
configuration in bfloat16 on one batch that stays, ``fed`` the same step on every batch that the
loader gives. The parts (read, order) show which of them is the limit. The last line says whether
the loader alone gives NEEDED times the rows that the step of the largest batch takes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy
import torch

from fuselab.data import KAGGLE_CARDINALITIES, Dataset, Loader, open_dataset
from fuselab.data.loader import READERS
from fuselab.data.prepared import SCHEMA, Prepared
from fuselab.data.processes import available_cores
from fuselab.data.records import RECORD, Batch
from fuselab.data.shuffle import permutation
from fuselab.device import environment
from fuselab.models.dlrm import MAIN, Dlrm
from fuselab.report.files import write_json
from fuselab.runtime import autograd_node
from fuselab.train.dlrm_modes import FusedStep

WINDOW = 1 << 20
NEEDED = 1.2  # multiple of the step's rate


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--data", type=Path, help="a prepared folder")
    parser.add_argument("--rows", type=int, default=32 << 20, help="random rows, 160 bytes each")
    parser.add_argument("--batch", type=int, nargs="+", default=[128, 2048, 65536])
    parser.add_argument("--largest", type=int, default=2**31, help="rows of the largest table")
    parser.add_argument("--seconds", type=float, default=2.0, help="per figure")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    autograd_node.start()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as made:
        sizes = [min(size, options.largest) for size in KAGGLE_CARDINALITIES]
        folder = options.data or random_records(Path(made), options.rows, sizes)
        figures, data = dict(parts(folder)), open_dataset(folder)
        for batch in options.batch:
            figures.update(loaded(data, batch, device, options.seconds))
    for name, figure in figures.items():
        print(f"{name:50} {figure:14,.2f}")
    largest = max(options.batch)
    given, step = (figures[f"{largest}: {name} (M rows/s)"] for name in ("given", "step"))
    print(
        f"{largest}: the loader gives {given / step:.2f} times the rows that the step takes, "
        f"{NEEDED} asked: {'yes' if given >= NEEDED * step else 'no'}"
    )
    if options.json:
        facts = {"schema": 1, "environment": environment.describe(), "rows": data.rows}
        write_json(options.json, {**facts, "figures": figures})


def random_records(folder: Path, rows: int, sizes: Sequence[int]) -> Path:
    """Make a prepared folder whose shards are copies of one."""
    some = numpy.random.default_rng(0)
    shard = numpy.empty(min(rows, WINDOW), RECORD)
    shard["dense"] = some.random((len(shard), 13), dtype=numpy.float32)
    shard["label"] = some.random(len(shard)) < 0.25
    for column, size in enumerate(sizes):
        shard["sparse"][:, column] = some.integers(0, size, len(shard))
    shards = []
    for number, first in enumerate(range(0, rows, len(shard))):
        held = shard[: rows - first]
        numpy.save(folder / f"rows-{number}.npy", held)
        shards.append({"file": f"rows-{number}.npy", "rows": len(held)})
    manifest = {
        "schema": SCHEMA,
        "cardinalities": sizes,
        "validation_first": rows,
        "shards": shards,
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def parts(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the millions of rows a second that each step of a window can do alone."""
    prepared = Prepared(folder)
    rows = min(prepared.rows, WINDOW)
    records = numpy.zeros(rows, RECORD)
    for threads in sorted({1, 4, 8, READERS, available_cores()}):
        step = -(-rows // (2 * threads))
        cuts = range(0, rows, step)
        with ThreadPoolExecutor(threads) as pool:

            def read(pool: ThreadPoolExecutor = pool, step: int = step, cuts: range = cuts) -> None:
                list(pool.map(lambda cut: prepared.read_into(records[cut : cut + step], cut), cuts))

            yield f"read, {threads} threads (M rows/s)", rows / seconds(read) / 1e6
    yield "order, 1 thread (M rows/s)", rows / seconds(lambda: permutation(rows, (1,))) / 1e6


def loaded(
    data: Dataset, size: int, device: torch.device, least_s: float
) -> Iterator[tuple[str, float]]:
    """Yield the millions of rows a second of the loader alone, of the step alone, and of both."""
    config = replace(MAIN, cardinalities=data.cardinalities, largest_table=max(data.cardinalities))
    with torch.device(device):
        # Before the first batch, because the loader's thread must not work while a graph is
        # captured.
        step = FusedStep(Dlrm(config), "sgd", size, half=True)
    kept = Batch(*(part.clone() for part in next(endless(loader_of(data, size, 0, device)))))

    def copy(batch: Batch) -> None:
        for mine, given in zip(kept, batch, strict=True):
            mine.copy_(given, non_blocking=True)

    def train(batch: Batch) -> None:
        step(batch, 0.1)

    for name, window in (("in order", 0), ("given", WINDOW)):
        batches = endless(loader_of(data, size, window, device))
        for _ in range(2 * min(WINDOW, data.rows) // size):  # until every buffer is allocated
            next(batches)
        yield f"{size}: {name} (M rows/s)", size / consumed(batches, copy, device, least_s) / 1e6
    if device.type == "cuda":  # with the step more windows are alive, so the first ones allocate
        for batch in itertools.islice(batches, 4 * min(WINDOW, data.rows) // size):
            train(batch)
    for name, given in (("step", itertools.repeat(kept)), ("fed", batches)):
        per_batch = consumed(given, train, device, least_s)
        yield f"{size}: {name} (M rows/s)", size / per_batch / 1e6
        yield f"{size}: {name} (us)", per_batch * 1e6


def loader_of(data: Dataset, size: int, window: int, device: torch.device) -> Loader:
    return Loader(data, size, shuffle_window=window, device=device, drop_last=True)


def consumed(
    batches: Iterator[Batch],
    work: Callable[[Batch], object],
    device: torch.device,
    least_s: float,
) -> float:
    """Return the seconds per batch, with ``work`` done on each.

    The device is waited for once in 16 batches, otherwise the host would queue work without end.
    """
    start, count = time.perf_counter(), 0
    while not count or time.perf_counter() - start < least_s:
        for _ in range(16):
            work(next(batches))
        count += 16
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / count


def endless(loader: Loader) -> Iterator[Batch]:
    while True:
        yield from loader


def seconds(work: Callable[[], object]) -> float:
    """Return the median of some calls, without the first."""
    work()
    times = []
    for _ in range(9):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
