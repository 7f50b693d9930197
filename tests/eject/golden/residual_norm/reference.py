"""The definition of residual_norm, in the code that it was ejected from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def residual_norm(x, residual, weight, bias):
    hidden = x + residual
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5)
    return F.gelu(normed) * 2


def reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Compute residual_norm(x, residual, weight, bias)."""
    output: Tensor = residual_norm(x, residual, weight, bias)
    return output
