"""Packs: elements that a CUDA thread loads or stores by one access of 16 bytes."""

from __future__ import annotations

import torch
from torch import Tensor


def is_aligned(*tensors: Tensor | None) -> bool:
    """Return whether all data pointers are multiples of 16 bytes; None counts as aligned."""
    return all(tensor is None or tensor.data_ptr() % 16 == 0 for tensor in tensors)


def pack_width(*dtypes: torch.dtype | None) -> int:
    """Return the elements in a pack of 16 bytes of the narrowest dtype; None is skipped."""
    return 16 // min(dtype.itemsize for dtype in dtypes if dtype is not None)
