"""Criteo's layout: one label, 13 counts, 26 hashed categories, and the names of the columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES as KAGGLE_CARDINALITIES

DENSE_COLUMNS = 13
SPARSE_COLUMNS = 26
COLUMNS = 1 + DENSE_COLUMNS + SPARSE_COLUMNS

# The values in ``Rows`` for an empty field. Counts may be negative, so theirs is the smallest
# int64.
MISSING_LABEL = 255
MISSING_COUNT = int(numpy.iinfo(numpy.int64).min)
MISSING_ID = -1

# the end of a sentence that refuses rows without a label
FOR_PREDICT = "Rows without a label are for 'fuselab predict' alone."

Counts = numpy.typing.NDArray[Any]  # int64 or float32


@dataclass(frozen=True)
class Rows:
    """Some rows as the file has them, untransformed.

    ``labels`` uint8 [n], MISSING_LABEL in rows to score that have none; ``counts`` int64 [n, 13]
    with MISSING_COUNT where the field is empty (parquet's are float32, NaN where null); ``ids``
    int64 [n, 26]: the hex as an unsigned 32-bit number, MISSING_ID where empty.
    """

    labels: numpy.typing.NDArray[numpy.uint8]
    counts: Counts
    ids: numpy.typing.NDArray[numpy.int64]

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, window: slice) -> Rows:
        return Rows(self.labels[window], self.counts[window], self.ids[window])


def is_missing(counts: Counts) -> numpy.typing.NDArray[numpy.bool_]:
    """Return where a count is missing, as booleans of the shape of ``counts``."""
    return numpy.isnan(counts) if counts.dtype.kind == "f" else counts == MISSING_COUNT


def concatenate(pieces: list[Rows]) -> Rows:
    """Return the rows of the pieces in order; there must be at least one piece."""
    if len(pieces) == 1:
        return pieces[0]
    return Rows(
        numpy.concatenate([piece.labels for piece in pieces]),
        numpy.concatenate([piece.counts for piece in pieces]),
        numpy.concatenate([piece.ids for piece in pieces]),
    )


def column_name(column: int) -> str:
    """Return the usual name of a 0-based column: label, I1 to I13, C1 to C26."""
    if column == 0:
        return "label"
    if column <= DENSE_COLUMNS:
        return f"I{column}"
    return f"C{column - DENSE_COLUMNS}"


def last_seventh(rows: int) -> int:
    """Return where the last seventh begins, since the Kaggle set is seven days in order,
    undated."""
    return rows - rows // 7
