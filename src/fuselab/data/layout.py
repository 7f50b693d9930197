"""Criteo's layout: one label, 13 counts, 26 hashed categories, and what a column is called."""

from __future__ import annotations

from dataclasses import dataclass

import numpy
import numpy.typing

DENSE_COLUMNS = 13
SPARSE_COLUMNS = 26
COLUMNS = 1 + DENSE_COLUMNS + SPARSE_COLUMNS

# What stands in ``Rows`` for an empty field. Counts may be negative, so theirs is out of the way.
MISSING_COUNT = int(numpy.iinfo(numpy.int64).min)
MISSING_ID = -1

# Distinct ids per categorical column of the Kaggle challenge's train.txt (45,840,617 rows).
KAGGLE_CARDINALITIES = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683, 8_351_593, 3_194,
    27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip


@dataclass(frozen=True)
class Rows:
    """Some rows as the file has them, untransformed.

    ``labels`` uint8 [n], ``counts`` int64 [n, 13] with MISSING_COUNT where the field is empty,
    ``ids`` int64 [n, 26]: the hex as an unsigned 32-bit number, MISSING_ID where empty.
    """

    labels: numpy.typing.NDArray[numpy.uint8]
    counts: numpy.typing.NDArray[numpy.int64]
    ids: numpy.typing.NDArray[numpy.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, window: slice) -> Rows:
        return Rows(self.labels[window], self.counts[window], self.ids[window])


def concatenate(pieces: list[Rows]) -> Rows:
    """The pieces' rows in order. At least one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(
        numpy.concatenate([piece.labels for piece in pieces]),
        numpy.concatenate([piece.counts for piece in pieces]),
        numpy.concatenate([piece.ids for piece in pieces]),
    )


def column_name(column: int) -> str:
    """What the field calls a 0-based column: label, I1 to I13, C1 to C26."""
    if column == 0:
        return "label"
    if column <= DENSE_COLUMNS:
        return f"I{column}"
    return f"C{column - DENSE_COLUMNS}"
