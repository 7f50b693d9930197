"""Rows of a file, piece by piece, and as the tensors a model takes: labels, counts, ids."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy
import torch

from fuselab.data.dense import log_counts
from fuselab.data.layout import Rows
from fuselab.data.records import Batch
from fuselab.data.rejects import Rejects, warn_of_cut
from fuselab.data.source import Source
from fuselab.errors import DataError


def read(path: str | Path, rows: int = 65_536) -> Iterator[Rows]:
    """Yield the rows at ``path`` (see ``Source.at``) in order, ``rows`` at a time.

    The last piece may be shorter. A last line of text that stops short of its 40 columns is left
    out with one TruncatedLineWarning. Anything else that is malformed raises DataError with its
    place, and so does a file without a single complete row.
    """
    rejects = Rejects()
    yield from Source.at(path).read(rows, rejects)
    warn_of_cut(rejects)


def batches(path: str | Path, batch_size: int) -> Iterator[Batch]:
    """Yield the file's rows in order as batches of ``batch_size``; the last may be smaller.

    Raises DataError as ``read`` does.
    """
    if batch_size < 1:
        raise DataError(f"batch_size is {batch_size}; it must be at least 1.")
    # Small batches are cut from larger pieces: reading 64 rows at a time would take longer in numpy
    # calls than in reading the bytes.
    for rows in read(path, batch_size * max(1, 8_192 // batch_size)):
        for start in range(0, len(rows), batch_size):
            yield to_batch(rows[start : start + batch_size])


def to_batch(rows: Rows) -> Batch:
    """Return the rows as tensors; counts go through ``log_counts``, ids stay, missing ones as
    -1."""
    return Batch(
        torch.from_numpy(rows.labels.astype(numpy.float32)),
        torch.from_numpy(log_counts(rows.counts)),
        torch.from_numpy(numpy.ascontiguousarray(rows.ids)),
    )
