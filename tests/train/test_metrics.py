"""AUC against its definition, pair by pair; loss and accuracy by hand."""

from __future__ import annotations

import math

import pytest
import torch

from fuselab.train.metrics import auc, metrics


def _by_pairs(scores: torch.Tensor, labels: torch.Tensor) -> float:
    difference = scores[labels == 1][:, None] - scores[labels == 0][None]
    return ((difference > 0).double() + (difference == 0).double() / 2).mean().item()


@pytest.mark.parametrize("distinct", [1, 2, 5, 10_000])
def test_auc_counts_pairs_and_half_of_the_ties(distinct: int) -> None:
    generator = torch.Generator().manual_seed(distinct)
    scores = torch.randint(distinct, (301,), generator=generator).double()
    labels = (torch.rand(301, generator=generator) < 0.3).double()
    assert auc(scores, labels) == pytest.approx(_by_pairs(scores, labels), abs=1e-12)


def test_auc_at_the_ends() -> None:
    labels = torch.tensor([0.0, 0.0, 1.0])
    assert auc(torch.tensor([1.0, 2.0, 3.0]), labels) == 1.0
    assert auc(torch.tensor([1.0, 2.0, -3.0]), labels) == 0.0
    assert math.isnan(auc(torch.tensor([1.0, 2.0]), torch.zeros(2)))
    assert math.isnan(auc(torch.tensor([math.nan, 2.0, 3.0]), labels))


def test_loss_and_accuracy() -> None:
    found = metrics(torch.tensor([0.0, 2.0, -1.0, 3.0]), torch.tensor([0.0, 1.0, 1.0, 1.0]))
    losses = [math.log(2), math.log1p(math.exp(-2)), math.log1p(math.e), math.log1p(math.exp(-3))]
    assert (found.rows, found.accuracy) == (4, 0.75)
    assert found.loss == pytest.approx(sum(losses) / 4)
    assert found.auc == pytest.approx(2 / 3)
