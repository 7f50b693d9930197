"""One row as a model takes it, in 160 bytes: 13 dense floats, the label, 26 indices.

A batch of records is one block of memory: one read from the disk, one copy to the device, one
gather to shuffle it. Labels, dense and sparse are views of it with a row stride of 40 words. Rows
begin at multiples of 32 bytes, so dense can be loaded 16 bytes at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
import numpy.typing
import torch
from torch import Tensor

from fuselab.data.dense import Dense
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import DENSE_COLUMNS, MISSING_LABEL, SPARSE_COLUMNS, Rows

RECORD = numpy.dtype(
    [("dense", "<f4", (DENSE_COLUMNS,)), ("label", "<f4"), ("sparse", "<i4", (SPARSE_COLUMNS,))]
)
WORDS = RECORD.itemsize // 4
Records = numpy.typing.NDArray[numpy.void]  # of dtype RECORD


class Batch(NamedTuple):
    """B rows: ``labels`` float32 [B], ``dense`` float32 [B, 13], ``sparse`` int32 or int64 [B, 26].

    A label is 0 or 1, or NaN in rows without one, which ``open_dataset`` gives only when asked. A
    ``Loader`` yields indices into the tables, int32, and the three are views of one block;
    ``batches`` yields the file's ids, int64.
    """

    labels: Tensor
    dense: Tensor
    sparse: Tensor


def fill(out: Records, rows: Rows, ids: Modulus | Vocabulary, dense: Dense) -> None:
    """Write the rows, transformed, into ``out`` [n]; a missing label is NaN."""
    out["dense"] = dense(rows.counts)
    out["label"] = rows.labels
    out["label"][rows.labels == MISSING_LABEL] = numpy.nan
    out["sparse"] = ids.indices(rows.ids)


def as_batch(words: Tensor) -> Batch:
    """Return views of records given as int32 [B, 40]."""
    floats = words.view(torch.float32)
    dense, label = floats[:, :DENSE_COLUMNS], floats[:, DENSE_COLUMNS]
    return Batch(label, dense, words[:, DENSE_COLUMNS + 1 :])
