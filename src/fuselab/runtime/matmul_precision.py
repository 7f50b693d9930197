"""The arithmetic of float32 matrix products: whether TF32 is allowed, by PyTorch's settings."""

from __future__ import annotations

import torch


def allows_tf32() -> bool:
    """Return whether ``torch.backends.cuda.matmul`` allows TF32, however the program has set it.

    ``allow_tf32`` raises if a program has used both the old and the new setting;
    ``fp32_precision`` follows both. It is a part of a launch plan's key, so implementations may
    depend on it.
    """
    return bool(torch.backends.cuda.matmul.fp32_precision == "tf32")


def input_precision(dtype: torch.dtype) -> str:
    """Return ``input_precision`` of ``tl.dot`` for a dtype; only for float32 there are two."""
    return "tf32" if dtype == torch.float32 and allows_tf32() else "ieee"
