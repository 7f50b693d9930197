"""What a Criteo file holds: rows, positives, per column missing, range, cardinality."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy
import numpy.typing

from fuselab.data.batches import read
from fuselab.data.layout import DENSE_COLUMNS, MISSING_COUNT, MISSING_ID, SPARSE_COLUMNS

_ROWS_PER_PIECE = 262_144


@dataclass(frozen=True)
class CountColumn:
    """One integer column; missing fields take no part in range and mean (None if all miss)."""

    name: str
    missing: int
    smallest: int | None
    largest: int | None
    mean_log: float | None  # of log(max(count, 0) + 1)


@dataclass(frozen=True)
class IdColumn:
    """One categorical column; ``cardinality`` counts the distinct ids, missing left out."""

    name: str
    missing: int
    cardinality: int


@dataclass(frozen=True)
class Description:
    """What the whole file holds."""

    file: str
    rows: int
    positives: int
    counts: tuple[CountColumn, ...]
    ids: tuple[IdColumn, ...]

    @property
    def label_rate(self) -> float:
        return self.positives / self.rows


def describe(path: str | Path) -> Description:
    """Reads the file once, exactly: memory grows with the distinct ids (4 bytes each), not rows.

    Raises DataError as ``read`` does.
    """
    rows = positives = 0
    counts = [_CountSummary() for _ in range(DENSE_COLUMNS)]
    distinct = [_DistinctIds() for _ in range(SPARSE_COLUMNS)]
    for piece in read(path, _ROWS_PER_PIECE):
        rows += len(piece)
        positives += int(piece.labels.sum())
        for column, summary in enumerate(counts):
            summary.add(piece.counts[:, column])
        for column, ids in enumerate(distinct):
            ids.add(piece.ids[:, column])
    return Description(
        str(path),
        rows,
        positives,
        tuple(summary.column(f"I{number}") for number, summary in enumerate(counts, 1)),
        tuple(ids.column(f"C{number}") for number, ids in enumerate(distinct, 1)),
    )


class _CountSummary:
    """Running range and mean of one integer column."""

    def __init__(self) -> None:
        self.missing = self.present = 0
        self.smallest: int | None = None
        self.largest: int | None = None
        self.sum_log = 0.0

    def add(self, counts: numpy.typing.NDArray[numpy.int64]) -> None:
        present = counts[counts != MISSING_COUNT]
        self.missing += len(counts) - len(present)
        if not len(present):
            return
        low, high = int(present.min()), int(present.max())
        self.smallest = low if self.smallest is None else min(low, self.smallest)
        self.largest = high if self.largest is None else max(high, self.largest)
        self.present += len(present)
        self.sum_log += float(numpy.log1p(numpy.maximum(present, 0)).sum())

    def column(self, name: str) -> CountColumn:
        mean_log = self.sum_log / self.present if self.present else None
        return CountColumn(name, self.missing, self.smallest, self.largest, mean_log)


class _DistinctIds:
    """The distinct ids of one column, sorted; new ones are merged when they are as many."""

    def __init__(self) -> None:
        self.missing = 0
        self.held = numpy.empty(0, dtype=numpy.uint32)
        self.waiting: list[numpy.typing.NDArray[numpy.uint32]] = []

    def add(self, ids: numpy.typing.NDArray[numpy.int64]) -> None:
        present = ids[ids != MISSING_ID]
        self.missing += len(ids) - len(present)
        self.waiting.append(numpy.unique(present.astype(numpy.uint32)))
        if sum(map(len, self.waiting)) >= len(self.held):
            self._merge()

    def _merge(self) -> None:
        self.held = numpy.unique(numpy.concatenate([self.held, *self.waiting]))
        self.waiting = []

    def column(self, name: str) -> IdColumn:
        self._merge()
        return IdColumn(name, self.missing, len(self.held))
