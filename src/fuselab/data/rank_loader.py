"""A loader of which each of several ranks has its part of every batch, in one order for all.

A window of rows is divided into lanes of neighbours, and every batch takes its rows in turn from
all lanes: lane l fills the places ``B * l // L`` to ``B * (l + 1) // L`` of each. A lane's rows are
shuffled among themselves. A rank has some lanes, which are neighbours, so it reads one stretch of
the file per window, no rank reads another's rows, and the batch of all ranks together is the same
for any number of ranks. The number of lanes L depends on the batch size alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy
import numpy.typing
import torch

from fuselab.data.dataset import Dataset
from fuselab.data.loader import Loader, Position, _Window
from fuselab.data.shuffle import permutations
from fuselab.errors import ArgumentError

_LANES, _LANE_ROWS = 64, 1024  # at least so many lanes, or so few rows of each in a batch


def lanes_of(batch_size: int) -> int:
    """Return the number of lanes, which is the largest number of ranks."""
    return min(batch_size, max(_LANES, -(-batch_size // _LANE_ROWS)))


def rows_of_ranks(batch_size: int, world_size: int) -> list[int]:
    """Return how many rows of each batch every rank has; they differ by at most a lane's.

    Raises ArgumentError if there are more ranks than lanes.
    """
    lanes = lanes_of(batch_size)
    if not 0 < world_size <= lanes:
        raise ArgumentError(
            f"a batch of {batch_size} rows is divided among at most {lanes} ranks, and there are "
            f"{world_size}; give a larger --batch-size, which counts the rows of all ranks, or "
            "fewer ranks."
        )
    edges = [batch_size * (lanes * part // world_size) // lanes for part in range(world_size + 1)]
    return [end - begin for begin, end in pairwise(edges)]


class RankLoader(Loader):
    """An iterable over this rank's rows of each batch, epoch after epoch.

    It is a ``Loader`` whose batches are parts of batches of ``batch_size`` rows; a rest of the
    epoch that fills no batch is left out. ``position`` counts the rows of all ranks, so any number
    of ranks continues from it.

    Args:
        data: as for ``Loader``.
        batch_size: rows of a batch, of all ranks together.
        shuffle_window: rows within which rows are shuffled, rounded up to whole batches.
        seed: of the order.
        rank, world_size: which part of each batch is yielded; sizes differ by at most a lane.
        device: of the batches.
        start: the ``position`` to continue from.

    Raises ArgumentError if there are more ranks than lanes, and as ``Loader`` does.
    """

    def __init__(
        self,
        data: Dataset | str | Path,
        batch_size: int,
        *,
        shuffle_window: int,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        device: str | torch.device = "cpu",
        start: Position = Position(),  # noqa: B008 - immutable
    ) -> None:
        super().__init__(
            data,
            batch_size,
            shuffle_window=max(1, shuffle_window),
            seed=seed,
            device=device,
            drop_last=True,
            start=start,
        )
        counts = rows_of_ranks(batch_size, world_size)
        if not 0 <= rank < world_size:
            raise ArgumentError(f"rank {rank} of {world_size}; expected 0 to world_size - 1.")
        self._lanes = lanes_of(batch_size)
        begin, end = (self._lanes * part // world_size for part in (rank, rank + 1))
        self._mine = range(begin, end)
        self._before = self._edge(begin)  # places of a batch before this rank's
        self.yielded = counts[rank]

    def _edge(self, lane: int) -> int:
        return self.batch_size * lane // self._lanes

    def _windows(self, done: int) -> Iterator[_Window]:
        for first in range(done - done % self._window, self.rows, self._window):
            batches = min(self._window, self.rows - first) // self.batch_size
            skip = max(done - first, 0) // self.batch_size * self.yielded
            size = batches * self.yielded
            yield _Window(
                first // self._window,
                first + batches * self._before,
                size,
                skip,
                size,
                max(done, first),
            )

    def order(self, epoch: int, window: _Window) -> numpy.typing.NDArray[numpy.int32]:
        batches = window.size // self.yielded
        # The key has a word for every lane, so a lane is shuffled alike whoever reads it.
        rows = [0] * self._lanes
        for lane in self._mine:
            rows[lane] = batches * (self._edge(lane + 1) - self._edge(lane))
        columns, first = [], 0
        for shuffled in permutations(rows, (self.seed, epoch, window.number)):
            if len(shuffled):
                columns.append(shuffled.reshape(batches, -1) + numpy.int32(first))
                first += len(shuffled)
        return numpy.concatenate(columns, axis=1).reshape(-1)
