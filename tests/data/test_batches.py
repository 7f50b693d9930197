"""Rows as tensors: dtypes, the log transform, what missing becomes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch
from criteo_rows import COUNTS, IDS, line, real_sample

from fuselab.data import MISSING_COUNT, batches, log_counts
from fuselab.errors import DataError


def test_a_batch_is_what_the_model_takes(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(line("1") + "\n" + line("0") + "\n")
    (batch,) = batches(path, 8)
    assert batch.labels.dtype == torch.float32
    assert batch.labels.tolist() == [1.0, 0.0]
    assert batch.dense.dtype == torch.float32
    expected = [math.log1p(max(int(count), 0)) if count else 0.0 for count in COUNTS]
    torch.testing.assert_close(batch.dense[0], torch.tensor(expected))
    assert batch.sparse.dtype == torch.int64
    assert batch.sparse[1].tolist() == [int(id, 16) if id else -1 for id in IDS]


def test_negative_zero_and_missing_counts_become_exactly_zero() -> None:
    counts = numpy.array([[MISSING_COUNT, -1, -2, 0, 1, 10**15]])
    dense = log_counts(counts)
    assert dense[0, :4].tolist() == [0.0] * 4
    assert dense[0, 4] == numpy.float32(math.log(2))
    assert dense[0, 5] == pytest.approx(math.log(10**15), rel=1e-6)


@pytest.mark.parametrize(("size", "last"), [(1, 1), (64, 15), (1999, 1999), (5000, 1999)])
def test_every_row_comes_once_and_in_order(size: int, last: int) -> None:
    path = real_sample()
    found = list(batches(path, size))
    assert [len(batch.labels) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert len(found[-1].labels) == last
    labels = torch.cat([batch.labels for batch in found])
    assert labels.tolist() == [float(text[0]) for text in path.read_text().splitlines()]


def test_an_empty_batch_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="must be at least 1"):
        list(batches(tmp_path / "a.tsv", 0))
