"""dropped_residual, ejected from plain PyTorch by fuselab."""

from __future__ import annotations

from typing import Any

from torch import Tensor

import fuselab
from fuselab.runtime.dropout import seed_tensor

from .op import OP

_operator = fuselab.operator(OP)


def dropped_residual(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: int | Tensor | None = None,
    *,
    implementation: str = "auto",
) -> Any:
    """Compute dropped_residual by its kernels, and return what the ejected function returns.

    Dropouts take their masks from ``seed``, equal ones from equal seeds; None draws a seed
    from PyTorch's generator.
    """
    seed = seed_tensor(seed, x.device)
    output = _operator(x, residual, weight, bias, seed, implementation=implementation)
    return output


__all__ = ["OP", "dropped_residual"]
