"""The bytes and the arithmetic that operands need at least, for ``FusedOp.cost``."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.op import bytes_behind as bytes_behind
from fuselab.runtime.matmul_precision import allows_tf32


def bytes_of(*tensors: Tensor | None) -> int:
    """Return the bytes of dense tensors with these shapes and dtypes, such as the operands'
    gradients; None counts nothing."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def arithmetic_unit(dtype: torch.dtype) -> str:
    """Return the arithmetic that a pointwise kernel with this output dtype uses, as
    ``Cost.unit``."""
    return "fp64" if dtype == torch.float64 else "fp32"


def product_unit(dtype: torch.dtype) -> str:
    """Return the arithmetic of a matrix product in this dtype, as ``Cost.unit``."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    return {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}[dtype]
