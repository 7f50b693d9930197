"""Batches: every row once, in an order that the seed decides, from any position, for any rank."""

from __future__ import annotations

import contextlib
import gzip
import threading
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor

from fuselab.data import (
    Dataset,
    Dense,
    Loader,
    Modulus,
    Position,
    TruncatedLineWarning,
    open_dataset,
    pieces,
    synthesize,
)
from fuselab.data.layout import concatenate
from fuselab.data.prepare import prepare
from fuselab.data.prepared import Prepared
from fuselab.errors import ArgumentError, DataError, DeviceError, UnknownNameError

ROWS = 700
IDS = Modulus.capped(1000)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.tsv"
    synthesize(path, ROWS, seed=6)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Path:
    out = tmp_path_factory.mktemp("prepared") / "out"
    prepare(text, out, ids=IDS, processes=1, part_bytes=30_000)
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> Dataset:
    return open_dataset(folder)


def counted(rows: int) -> Dataset:
    """Synthetic rows, the first ``rows`` of seed 6."""
    return open_dataset(None, rows=rows, seed=6, ids=IDS)


def labelled_by_number(rows: int) -> Dataset:
    """Rows whose label is their number: what a shuffle does is to be seen."""

    class Numbers:
        rows_per_read = 5

        def read_into(self, out: numpy.ndarray, first: int) -> None:
            out[:] = 0
            out["label"] = numpy.arange(first, first + len(out))

    return Dataset("numbers", rows, (1,) * 26, Numbers, rows)


def numbers(loaded: Loader) -> list[list[int]]:
    return [batch.labels.int().tolist() for batch in loaded]


def flat(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


# --- what a batch is -----------------------------------------------------------------------------


def test_a_batch_holds_the_rows_transformed(data: Dataset) -> None:
    drawn = concatenate(list(pieces(ROWS, seed=6)))
    (batch,) = Loader(data, ROWS)
    assert [part.dtype for part in batch] == [torch.float32, torch.float32, torch.int32]
    assert [tuple(part.shape) for part in batch] == [(ROWS,), (ROWS, 13), (ROWS, 26)]
    assert batch.labels.tolist() == drawn.labels.tolist()
    assert torch.equal(batch.dense, torch.from_numpy(Dense()(drawn.counts)))
    assert torch.equal(batch.sparse.long(), torch.from_numpy(IDS.indices(drawn.ids)))
    assert (batch.sparse.max(0).values < torch.tensor(data.cardinalities)).all()
    assert data.cardinalities == IDS.cardinalities


def test_all_sources_give_the_same_batches(text: Path, folder: Path, tmp_path: Path) -> None:
    packed = tmp_path / "rows.tsv.gz"
    packed.write_bytes(gzip.compress(text.read_bytes()))
    sources = [
        open_dataset(folder),
        open_dataset(text, ids=IDS),
        open_dataset(packed, ids=IDS),
        counted(ROWS),
    ]
    for split in ("train", "validation"):
        for shuffle_window in (0, 128):
            every = [
                list(Loader(source.split(split), 32, shuffle_window=shuffle_window, seed=1))
                for source in sources
            ]
            for batches in every[1:]:
                assert len(batches) == len(every[0]) > 0
                for batch, wanted in zip(batches, every[0], strict=True):
                    assert all(map(torch.equal, batch, wanted))


def test_splits_share_no_row(data: Dataset) -> None:
    train, validation = data.split("train"), data.split("validation")
    assert (train.rows, validation.rows) == (600, 100)
    assert (train.first, validation.first) == (0, 600)
    assert train.split("validation").rows == validation.split("train").rows == 0
    with pytest.raises(UnknownNameError) as refused:
        data.split("test")
    assert (refused.value.kind, refused.value.name) == ("split", "test")


def test_the_last_of_several_raw_files_validates(tmp_path: Path) -> None:
    for day, rows in ((1, 5), (2, 7), (10, 4)):
        synthesize(tmp_path / f"day_{day}", rows)
    found = open_dataset(tmp_path)
    assert (found.rows, found.split("train").rows, found.split("validation").rows) == (16, 12, 4)


# --- which rows, in which order ------------------------------------------------------------------


@pytest.mark.parametrize("shuffle_window", [0, 1, 8, 64, 10**6])
@pytest.mark.parametrize("rows", [0, 1, 7, 8, 9, 15, 16, 17, 100])
def test_every_row_comes_once_at_the_boundaries(rows: int, shuffle_window: int) -> None:
    for drop_last in (False, True):
        load = Loader(
            labelled_by_number(rows), 8, shuffle_window=shuffle_window, drop_last=drop_last
        )
        found = numbers(load)
        kept = rows // 8 * 8 if drop_last else rows
        assert len(load) == len(found) == -(-kept // 8)
        assert [len(batch) for batch in found[:-1]] == [8] * (len(found) - 1)
        assert len(set(flat(found))) == len(flat(found)) == kept
        if kept == rows:
            assert sorted(flat(found)) == list(range(rows))
        assert load.position == Position(1, 0)


def test_without_a_window_rows_come_in_order() -> None:
    assert flat(numbers(Loader(labelled_by_number(100), 9))) == list(range(100))


def test_rows_stay_in_their_window_and_mix_within_it() -> None:
    found = flat(numbers(Loader(labelled_by_number(4032), 16, shuffle_window=1000)))
    window = 1008  # 1000, rounded up to whole batches
    for first in range(0, 4032, window):
        part = found[first : first + window]
        assert sorted(part) == list(range(first, first + window))
        assert len({number // 16 for number in part[:16]}) > 8  # neighbours are apart


def test_seed_epoch_and_window_decide_the_order() -> None:
    rows = labelled_by_number(64)
    one = Loader(rows, 8, shuffle_window=32, seed=1)
    first, second = numbers(one), numbers(one)
    assert first != second
    again = Loader(rows, 8, shuffle_window=32, seed=1)
    assert [numbers(again), numbers(again)] == [first, second]
    assert numbers(Loader(rows, 8, shuffle_window=32, seed=2)) != first
    assert [n - 32 for n in flat(first[4:])] != flat(first[:4])
    assert one.position == Position(2, 0)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 23, 24, 25, 100])
@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_ranks_partition_the_rows(rows: int, world_size: int, drop_last: bool) -> None:
    loaders = [
        Loader(
            labelled_by_number(rows), 4, shuffle_window=12, rank=rank, world_size=world_size,
            drop_last=drop_last,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    found = [numbers(each) for each in loaders]
    every = [number for rank in found for number in flat(rank)]
    if drop_last:
        assert {len(rank) for rank in found} == {rows // world_size // 4}
        assert len(set(every)) == len(every)
    else:
        assert sorted(every) == list(range(rows))
        sizes = [len(flat(rank)) for rank in found]
        assert max(sizes) - min(sizes) <= 1


# --- position ------------------------------------------------------------------------------------


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle_window", [0, 24, 1000])
def test_a_position_continues_exactly(shuffle_window: int, drop_last: bool) -> None:
    rows = labelled_by_number(101)
    options = {"shuffle_window": shuffle_window, "seed": 5, "drop_last": drop_last}
    whole = Loader(rows, 8, **options)
    wanted = numbers(whole) + numbers(whole) + numbers(whole)
    for stop in range(len(whole) * 2 + 1):
        load, given, position = Loader(rows, 8, **options), [], Position()
        while len(given) < stop:
            for batch in load:
                given.append(batch.labels.int().tolist())
                position = load.position
                if len(given) == stop:
                    break
        resumed = Loader(rows, 8, start=Position(*position), **options)
        while len(given) < len(wanted):
            given += numbers(resumed)
        assert given[: len(wanted)] == wanted


def test_a_loop_left_early_goes_on_where_it_stopped() -> None:
    load = Loader(labelled_by_number(40), 8)
    for batch in load:
        if batch.labels[0] == 8:
            break
    assert load.position == Position(0, 16)
    assert flat(numbers(load)) == list(range(16, 40))


def test_a_raw_file_is_resumed_by_reading_up_to_the_place(text: Path) -> None:
    source = open_dataset(text, ids=IDS)
    load = Loader(source, 64, shuffle_window=128, seed=2)
    batches = list(load)
    for number in (0, 1, 2, 9):
        start = Position(0, 64 * number)
        rest = list(Loader(source, 64, shuffle_window=128, seed=2, start=start))
        for batch, wanted in zip(rest, batches[number:], strict=True):
            assert all(map(torch.equal, batch, wanted))


# --- threads and errors --------------------------------------------------------------------------


def test_an_iteration_left_early_leaves_no_thread() -> None:
    before = threading.active_count()
    for _ in Loader(labelled_by_number(100_000), 16, shuffle_window=4096):
        break
    assert threading.active_count() == before


def test_what_a_reader_raises_reaches_the_loop(text: Path, tmp_path: Path) -> None:
    lines = text.read_text().splitlines(keepends=True)
    path = tmp_path / "rows.tsv"
    path.write_text("".join([*lines[:500], "x" + lines[500], *lines[501:]]))
    load = Loader(open_dataset(path), 50, shuffle_window=100)
    given = 0
    with pytest.raises(DataError, match=r"line 501, column 1 \(label\)"):
        for _ in load:
            given += 1
    assert load.position == Position(0, 50 * given)
    cut = open_dataset(text)
    path.write_text("".join(lines[:600]))
    fewer = Dataset("cut", cut.rows, cut.cardinalities, open_dataset(path).open_reader, 0)
    with pytest.raises(DataError, match="holds fewer rows than when it was opened"):
        list(Loader(fewer, 50))


def test_a_raw_file_that_stops_short_warns_once(text: Path, tmp_path: Path) -> None:
    path = tmp_path / "rows.tsv"
    path.write_bytes(text.read_bytes()[:-100])
    with pytest.warns(TruncatedLineWarning, match=f"line {ROWS}: the last line stops after") as w:
        found = open_dataset(path)
    assert len(w) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert sum(len(batch.labels) for batch in Loader(found, 64)) == found.rows == ROWS - 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch_size": 0}, "batch_size is 0, shuffle_window 0, seed 0; expected at least 1"),
        ({"shuffle_window": -1}, "shuffle_window -1"),
        ({"seed": -1}, "seed -1"),
        ({"rank": 2, "world_size": 2}, "rank 2 of 2; expected 0 to world_size - 1"),
        ({"rank": -1}, "rank -1 of 1"),
        ({"world_size": 0}, "rank 0 of 0"),
        ({"start": Position(0, 3)}, r"start is Position\(epoch=0, rows=3\)"),
        ({"start": Position(0, 108)}, "expected a position of a loader with this batch size"),
        ({"start": Position(-1, 0)}, "expected a position"),
    ],
)
def test_bad_calls(options, says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        Loader(labelled_by_number(100), **{"batch_size": 4, **options})


def test_bad_datasets(folder: Path, text: Path) -> None:
    with pytest.raises(ArgumentError, match="is prepared: its ids and counts are transformed"):
        open_dataset(folder, ids=IDS)
    with pytest.raises(ArgumentError, match="is prepared"):
        open_dataset(folder, dense="log3")
    with pytest.raises(ArgumentError, match="-1 rows of seed 0"):
        open_dataset(None, rows=-1)
    with pytest.raises(DataError, match="no file"):
        open_dataset(text.parent / "gone")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is said where CUDA is missing")
def test_no_cuda_device() -> None:
    with pytest.raises(DeviceError, match="no CUDA device is here"):
        Loader(labelled_by_number(4), 2, device="cuda")


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("shuffle_window", [0, 128, 4096])
def test_a_gpu_gets_the_batches_that_a_cpu_gets(
    data: Dataset, shuffle_window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Prepared, "rows_per_read", 10)
    here = Loader(data, 32, shuffle_window=shuffle_window, seed=1)
    there = Loader(data, 32, shuffle_window=shuffle_window, seed=1, device="cuda")
    for _ in range(3):
        for batch, wanted in zip(there, here, strict=True):
            assert all(part.is_cuda for part in batch)
            assert all(
                torch.equal(part.cpu(), other) for part, other in zip(batch, wanted, strict=True)
            )


@pytest.mark.gpu
def test_a_batch_stays_whole_while_slow_work_reads_it() -> None:
    """Windows are freed while kernels that read them are still queued; none may be written over."""
    kept: list[tuple[Tensor, Tensor]] = []
    load = Loader(labelled_by_number(200_000), 1000, shuffle_window=4000, seed=3, device="cuda")
    side = torch.cuda.Stream()
    for number, batch in enumerate(load):
        other = torch.cuda.stream(side) if number % 2 else contextlib.nullcontext()
        with other:
            if number % 2:
                side.wait_stream(torch.cuda.default_stream())
                batch.labels.record_stream(side)
            torch.cuda._sleep(2_000_000)
            kept.append((batch.labels.sum(dtype=torch.float64), batch.labels.max()))
    torch.cuda.synchronize()
    wanted = [
        (batch.labels.sum(dtype=torch.float64), batch.labels.max())
        for batch in Loader(labelled_by_number(200_000), 1000, shuffle_window=4000, seed=3)
    ]
    for found, expected in zip(kept, wanted, strict=True):
        assert [value.item() for value in found] == [value.item() for value in expected]


@pytest.mark.gpu
def test_batches_are_ready_on_the_stream_that_asks(data: Dataset) -> None:
    wanted = list(Loader(data, 64, shuffle_window=256, seed=9))
    with torch.cuda.stream(torch.cuda.Stream()):
        found = [
            [part.clone() for part in batch]
            for batch in Loader(data, 64, shuffle_window=256, seed=9, device="cuda")
        ]
        torch.cuda.current_stream().synchronize()
    for batch, expected in zip(found, wanted, strict=True):
        assert all(
            torch.equal(part.cpu(), other) for part, other in zip(batch, expected, strict=True)
        )


@pytest.mark.gpu
def test_a_graph_can_be_captured_while_the_loader_copies(data: Dataset) -> None:
    static = torch.zeros(32, device="cuda")
    graph = torch.cuda.CUDAGraph()
    batches = iter(Loader(data, 32, shuffle_window=64, device="cuda"))
    next(batches)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        total = static.sum()
    for batch in batches:
        if len(batch.labels) == 32:
            static.copy_(batch.labels)
            graph.replay()
            assert total.item() == batch.labels.sum().item()
