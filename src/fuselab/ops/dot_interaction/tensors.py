"""Sizes and tensors that every implementation of the dot interaction uses alike."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def pair_count(vectors: int) -> int:
    """Pairs of ``vectors`` vectors."""
    return vectors * (vectors - 1) // 2


def empty_output(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    batch, tables, width = embeddings.shape
    return dense.new_empty(batch, width + pair_count(tables + 1) + padding)


def empty_gradients(
    needs: Sequence[bool], dense: Tensor, embeddings: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Contiguous, whatever the strides of the inputs."""
    return (
        dense.new_empty(dense.shape) if needs[0] else None,
        embeddings.new_empty(embeddings.shape) if needs[1] else None,
    )


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself if its last dimension is contiguous, else a contiguous copy."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] < 2 else tensor.contiguous()


def element_type(dtype: torch.dtype) -> str:
    """The dtype's name in the CUDA kernels."""
    return _CUDA_TYPES[dtype]


_CUDA_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
}
