"""two_losses, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .launchers import operator as _operator



def two_losses(prediction: Tensor, target: Tensor, *, implementation: str = "auto") -> Any:
    """Compute two_losses by its kernels, and return what the ejected function returns."""
    output_0, output_1 = _operator(prediction, target, implementation=implementation)
    return (output_0, output_1)


__all__ = ["two_losses"]
