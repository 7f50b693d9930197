"""Batches of several ranks: together those of one, in its order, without a row twice."""

from __future__ import annotations

from itertools import chain

import numpy
import pytest
import torch

from fuselab.data import Dataset, Position
from fuselab.data.rank_loader import RankLoader, lanes_of, rows_of_ranks
from fuselab.errors import ArgumentError


def labelled_by_number(rows: int) -> Dataset:
    """Rows whose label is their number."""

    class Numbers:
        rows_per_read = 5

        def read_into(self, out: numpy.ndarray, first: int) -> None:
            out[:] = 0
            out["label"] = numpy.arange(first, first + len(out))

    return Dataset("numbers", rows, (1,) * 26, Numbers, rows)


def batches(world: int, size: int, start: Position = Position()) -> list[list[int]]:  # noqa: B008
    """The next epoch's batches of all ranks, put together."""
    data = labelled_by_number(700)
    loaders = [
        RankLoader(data, size, shuffle_window=256, seed=3, rank=rank, world_size=world, start=start)
        for rank in range(world)
    ]
    parts = [[batch.labels.int().tolist() for batch in loader] for loader in loaders]
    counts = rows_of_ranks(size, world)
    assert [{len(batch) for batch in part} for part in parts] == [{count} for count in counts]
    assert {loader.position for loader in loaders} == {Position(start.epoch + 1, 0)}
    return [list(chain(*together)) for together in zip(*parts, strict=True)]


@pytest.mark.parametrize("size", [7, 64, 100, 128])
def test_any_number_of_ranks_has_the_same_batches(size: int) -> None:
    wanted = batches(1, size)
    rows = list(chain(*wanted))
    assert len(rows) == 700 // size * size
    assert len(set(rows)) == len(rows)
    assert rows != sorted(rows)
    assert batches(1, size, Position(1, 0)) != wanted
    for world in (2, 3, 7):
        assert batches(world, size) == wanted
        assert batches(world, size, Position(0, 3 * size)) == wanted[3:]


def test_a_rank_reads_one_stretch_of_a_window() -> None:
    loader = RankLoader(labelled_by_number(700), 100, shuffle_window=300, rank=1, world_size=2)
    first_window = torch.cat([batch.labels for batch, _ in zip(loader, range(3), strict=False)])
    assert sorted(first_window.int().tolist()) == list(range(150, 300))


def test_too_many_ranks() -> None:
    assert lanes_of(3) == 3
    assert lanes_of(1 << 20) == 1024
    with pytest.raises(ArgumentError, match="at most 3 ranks, and there are 4"):
        rows_of_ranks(3, 4)
    with pytest.raises(ArgumentError, match="rank 2 of 2"):
        RankLoader(labelled_by_number(10), 4, shuffle_window=4, rank=2, world_size=2)
