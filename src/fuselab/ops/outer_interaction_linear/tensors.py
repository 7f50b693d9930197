"""Sizes, tensors and the pre-activation's gradient of the outer interaction's linear layer."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def empty_output(dense: Tensor, weight: Tensor) -> Tensor:
    return dense.new_empty(dense.shape[0], weight.shape[0])


def empty_gradients(
    needs: Sequence[bool], dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Contiguous, whatever the strides of the inputs."""
    return tuple(
        tensor.new_empty(tensor.shape) if wanted and tensor is not None else None
        for wanted, tensor in zip(needs, (dense, embeddings, weight, bias), strict=True)
    )
