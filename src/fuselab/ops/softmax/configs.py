"""The configurations of the GPU kernels for rows, and the one that tuning chose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.softmax.layout import Form, Rows, neighbours, positive
from fuselab.runtime import tuning
from fuselab.runtime.grid import power_of_two
from fuselab.runtime.tuning import Config

# A function of (step, bytes of the widest dtype, width, device) that returns what tuning may choose
# from for rows that are contiguous in the output. For columns there is nothing to choose.
Candidates = Callable[[str, int, int, torch.device], Sequence[Config]]


def chosen(
    implementation: str,
    candidates: Candidates,
    step: str,
    form: Form,
    rows: Rows,
    tensors: tuple[Tensor, ...],
) -> Config:
    """Return the configuration for these rows. The in-place form uses the choices of the other
    form. Widths with the same next power of two share one choice."""
    itemsize = max(tensor.element_size() for tensor in tensors)
    dtypes = tensors[0].dtype, tensors[-1].dtype
    return tuning.chosen(
        f"fuselab::{form}",
        implementation if step == "forward" else f"{implementation}_backward",
        (*dtypes, power_of_two(rows.width)),
        candidates(step, itemsize, rows.width, tensors[0].device),
    )


def forward_configs(
    candidates: Candidates, input: Tensor, dim: int, dtype: torch.dtype | None
) -> Sequence[Config]:
    """Return what ``chosen`` offers for these arguments, for ``FusedOp.configs``."""
    return _configs(candidates, "forward", input, dim, dtype or input.dtype)


def backward_configs(
    candidates: Candidates, needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> Sequence[Config]:
    """Return the same for the backward's arguments: the output, dim and the input's dtype."""
    return _configs(candidates, "backward", *saved)


def _configs(
    candidates: Candidates, step: str, tensor: Tensor, dim: int, dtype: torch.dtype
) -> Sequence[Config]:
    if not tensor.numel() or neighbours(tensor, dim) > 1:
        return ()
    width = tensor.shape[positive(dim, tensor)] if tensor.dim() else 1
    itemsize = max(tensor.element_size(), dtype.itemsize)
    return candidates(step, itemsize, width, tensor.device)
