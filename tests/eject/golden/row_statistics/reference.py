"""The definition of row_statistics, in the code that it was ejected from."""

from __future__ import annotations

import torch
from torch import Tensor


def row_statistics(x, weight):
    mean = x.mean(-1, keepdim=True)
    centred = (x - mean) * weight
    return {
        "centred": centred,
        "mean": mean.detach(),
        "is_positive": centred > 0,
        "count": (x > 0).sum(-1),
    }


def reference(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute row_statistics(x, weight)."""
    returned = row_statistics(x, weight)
    return returned["centred"], returned["mean"], returned["is_positive"], returned["count"]
