"""Loss, accuracy and AUC of a binary classifier over held-out rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Metrics:
    """The metrics of ``rows`` rows: mean ``loss`` (binary cross-entropy), ``accuracy`` at
    probability 0.5, and ``auc``, NaN if all labels are equal."""

    rows: int
    loss: float
    accuracy: float
    auc: float


def metrics(logits: Tensor, labels: Tensor) -> Metrics:
    """Compute the metrics of ``logits`` and ``labels`` (0 or 1), both [n]."""
    logits, labels = logits.detach().double().cpu(), labels.detach().double().cpu()
    return Metrics(
        rows=len(labels),
        loss=F.binary_cross_entropy_with_logits(logits, labels).item(),
        accuracy=((logits > 0) == (labels > 0.5)).double().mean().item(),
        auc=auc(logits, labels),
    )


def auc(scores: Tensor, labels: Tensor) -> float:
    """Return the share of pairs of a positive and a negative whose positive scores higher.

    A tie counts half. It is Mann and Whitney's rank sum, exact. ``scores`` and ``labels`` are [n].
    """
    positive = labels > 0.5
    positives = int(positive.sum())
    pairs = positives * (len(labels) - positives)
    if pairs == 0 or bool(scores.isnan().any()):
        return math.nan
    _, place, ties = torch.unique(scores, return_inverse=True, return_counts=True)
    mean_rank = ties.cumsum(0) - (ties - 1).double() / 2  # counted from 1
    rank_sum = mean_rank[place[positive]].sum().item()
    return float((rank_sum - positives * (positives + 1) / 2) / pairs)
