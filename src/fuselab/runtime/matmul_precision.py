"""Whether float32 matrix products may round their inputs to TF32, as PyTorch's own ask."""

from __future__ import annotations

import torch


def allows_tf32() -> bool:
    """What ``torch.backends.cuda.matmul`` allows, however the program has set it.

    ``allow_tf32`` raises where a program has used both the old and the new setting;
    ``fp32_precision`` follows both. The key of a launch plan has it, so whoever asks may leave one.
    """
    return torch.backends.cuda.matmul.fp32_precision == "tf32"


def input_precision(dtype: torch.dtype) -> str:
    """``tl.dot``'s ``input_precision`` for operands of a dtype; only float32 has two ways."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"
