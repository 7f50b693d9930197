"""row_statistics, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fuselab

from .op import OP

_operator = fuselab.operator(OP)


def row_statistics(x: Tensor, weight: Tensor, *, implementation: str = "auto") -> Any:
    """Compute row_statistics by its kernels, and return what the ejected function returns."""
    centred, mean, is_positive, count = _operator(x, weight, implementation=implementation)
    mean = mean.detach()
    return {"centred": centred, "mean": mean, "is_positive": is_positive, "count": count}


__all__ = ["OP", "row_statistics"]
