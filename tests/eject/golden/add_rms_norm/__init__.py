"""add_rms_norm, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fuselab

from .op import OP

_operator = fuselab.operator(OP)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, *, implementation: str = "auto"
) -> Any:
    """Compute add_rms_norm by its kernels, and return what the ejected function returns."""
    hidden, normed = _operator(x, residual, weight, implementation=implementation)
    if hidden.requires_grad and not (residual.requires_grad or x.requires_grad):
        hidden = hidden.detach()
    return (hidden, normed)


__all__ = ["OP", "add_rms_norm"]
