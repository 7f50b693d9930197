"""Synthetic Criteo: equal bytes, Kaggle's shape, and a signal that two models find."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from fuselab.data import (
    KAGGLE_CARDINALITIES,
    MISSING_COUNT,
    MISSING_ID,
    log_counts,
    pieces,
    read,
    synthesize,
    to_batch,
)
from fuselab.data.layout import Rows, concatenate
from fuselab.data.synthetic import CHUNK_ROWS
from fuselab.errors import ArgumentError
from fuselab.models.dlrm import Dlrm, DlrmConfig


@pytest.fixture(scope="module")
def drawn() -> Rows:
    return concatenate(list(pieces(8 * CHUNK_ROWS, seed=1)))


def test_equal_seeds_give_equal_bytes_and_a_longer_file_begins_the_same(tmp_path: Path) -> None:
    for name, rows, seed in (("a", 20_000, 3), ("b", 20_000, 3), ("c", 20_000, 4), ("d", 9, 3)):
        synthesize(tmp_path / name, rows, seed)
    a, b, c, d = ((tmp_path / name).read_bytes() for name in "abcd")
    assert a == b
    assert a != c
    assert a.startswith(d)
    assert a.count(b"\n") == 20_000
    assert d.count(b"\n") == 9


def test_the_file_reads_back_as_it_was_drawn(tmp_path: Path) -> None:
    rows = CHUNK_ROWS + 1  # the second chunk gives one row
    synthesize(tmp_path / "a.tsv", rows, seed=5)
    found = concatenate(list(read(tmp_path / "a.tsv")))
    drawn = concatenate(list(pieces(rows, seed=5)))
    assert (found.labels == drawn.labels).all()
    assert (found.counts == drawn.counts).all()
    assert (found.ids == drawn.ids).all()


def test_gzip_holds_the_same_text_and_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.tsv", "b.tsv.gz", "c.tsv.gz"):
        synthesize(tmp_path / name, 500)
    packed = (tmp_path / "b.tsv.gz").read_bytes()
    assert gzip.decompress(packed) == (tmp_path / "a.tsv").read_bytes()
    assert packed == (tmp_path / "c.tsv.gz").read_bytes()


def test_rates_are_those_of_the_real_rows(drawn: Rows) -> None:
    assert drawn.labels.mean() == pytest.approx(0.256, abs=0.01)
    missing_counts = (drawn.counts == MISSING_COUNT).mean(axis=0)
    missing_ids = (drawn.ids == MISSING_ID).mean(axis=0)
    assert missing_counts[[0, 1, 11]] == pytest.approx([0.445, 0.0, 0.777], abs=0.01)
    assert missing_ids[[0, 2, 21]] == pytest.approx([0.0, 0.033, 0.816], abs=0.01)
    # C19, C20, C25 and C26 miss together, as in the real rows.
    assert len({tuple(row) for row in (drawn.ids == MISSING_ID)[:, [18, 19, 24, 25]]}) == 2
    present = numpy.where(drawn.counts == MISSING_COUNT, 0, drawn.counts)
    assert present.min(axis=0).tolist() == [0, -2, *11 * [0]]


def test_ids_are_zipf_distributed_with_kaggle_cardinalities(drawn: Rows) -> None:
    for column, share in ((0, 0.51), (2, 0.06), (8, 0.90), (10, 0.024)):
        ids = drawn.ids[:, column]
        distinct, counts = numpy.unique(ids[ids != MISSING_ID], return_counts=True)
        assert len(distinct) <= KAGGLE_CARDINALITIES[column]
        assert counts.max() / len(ids) == pytest.approx(share, rel=0.1)
    # Seen once: the tail of a Zipf law with millions of ids.
    _, counts = numpy.unique(drawn.ids[:, 2], return_counts=True)
    assert (counts == 1).sum() > 20_000
    # A column of 583 ids shows them all, each a 32-bit number of its own.
    assert len(numpy.unique(drawn.ids[:, 1])) == 583
    assert drawn.ids.max() > 2**31


def test_a_logistic_regression_finds_the_signal(drawn: Rows) -> None:
    dense = torch.from_numpy(log_counts(drawn.counts)).double()
    frequent = [
        torch.from_numpy(drawn.ids[:, column] == value).double()
        for column in (0, 5, 13, 16, 17, 22)
        for value in _most_frequent(drawn.ids[:, column], 8)
    ]
    features = torch.cat([torch.ones(len(dense), 1), dense, torch.stack(frequent, 1)], 1)
    labels = torch.from_numpy(drawn.labels).double()
    half = len(labels) // 2
    weights = torch.zeros(features.shape[1], dtype=torch.float64)
    for _ in range(8):  # Newton's method
        chance = torch.sigmoid(features[:half] @ weights)
        curvature = features[:half].T @ (features[:half] * (chance * (1 - chance))[:, None])
        curvature += 1e-3 * torch.eye(len(weights))
        gradient = features[:half].T @ (chance - labels[:half])
        weights -= torch.linalg.solve(curvature, gradient)
    assert _auc(features[half:] @ weights, labels[half:]) > 0.74


def test_the_small_dlrm_learns_rows_of_one_seed_and_knows_those_of_another(drawn: Rows) -> None:
    torch.manual_seed(0)
    model = Dlrm(DlrmConfig(interaction="dot", largest_table=1000))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    batch = to_batch(drawn[: 5 * CHUNK_ROWS])
    for start in range(0, len(batch.labels), 512):
        labels, dense, sparse = (part[start : start + 512] for part in batch)
        loss = binary_cross_entropy_with_logits(model.logits(dense, sparse)[:, 0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    fresh = to_batch(concatenate(list(pieces(20_000, seed=2))))
    with torch.no_grad():
        scores = model.logits(fresh.dense, fresh.sparse)[:, 0]
    assert _auc(scores, fresh.labels) > 0.74


def test_bad_calls_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="0 rows were asked for"):
        synthesize(tmp_path / "a.tsv", 0)
    with pytest.raises(ArgumentError, match="the seed is -1"):
        synthesize(tmp_path / "a.tsv", 1, seed=-1)
    assert list(tmp_path.iterdir()) == []


def _most_frequent(ids: numpy.ndarray, many: int) -> list[int]:
    values, counts = numpy.unique(ids, return_counts=True)
    return values[numpy.argsort(counts)[::-1][:many]].tolist()


def _auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """The chance that a positive row scores above a negative one, from the sum of its ranks."""
    ranks = scores.argsort().argsort().double() + 1
    positives, negatives = labels.sum().item(), (1 - labels).sum().item()
    above = ranks[labels == 1].sum().item() - positives * (positives + 1) / 2
    return above / (positives * negatives)
