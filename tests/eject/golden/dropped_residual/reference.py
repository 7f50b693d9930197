"""The definition of dropped_residual, in the code that it was ejected from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.runtime.dropout import SeededDropout


def dropped_residual(x, residual, weight, bias):
    hidden = F.dropout(x, 0.1) + residual
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias)


def drawing(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> Tensor:
    """Compute dropped_residual(x, residual, weight, bias). PyTorch draws its masks."""
    output: Tensor = dropped_residual(x, residual, weight, bias)
    return output


def reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor) -> Tensor:
    """Compute ``drawing`` with the masks that follow from ``seed``."""
    with SeededDropout(seed):
        return drawing(x, residual, weight, bias, seed)
