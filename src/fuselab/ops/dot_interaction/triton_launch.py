"""Launching the Triton kernels: how many samples a program owns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.dot_interaction import triton_kernels
from fuselab.ops.dot_interaction.tensors import (
    empty_gradients,
    empty_output,
    power_of_two,
    readable,
)
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.triton_launch import launch

# Elements of the products that a program holds: 4 samples of DLRM's 27 vectors, 32 per thread.
_TILE = 4096
_WARPS = 4
_MOST_VECTORS = 128
_MOST_WIDTH = 256


def _tile(embeddings: Tensor) -> dict[str, Any]:
    """The constants of a launch; SAMPLES is at least 1 and halves as the tile grows."""
    vectors = power_of_two(embeddings.shape[1] + 1, 16)
    width = power_of_two(embeddings.shape[2], 16)
    return {
        "PRECISION": "tf32" if embeddings.dtype == torch.float32 and allows_tf32() else "ieee",
        "SAMPLES": max(1, _TILE // (vectors * max(vectors, width))),
        "VECTORS": vectors,
        "WIDTH": width,
    }


def forward(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    output = empty_output(dense, embeddings, padding)
    if output.numel() == 0:
        return output
    dense, embeddings = readable(dense), readable(embeddings)
    batch, tables, width = embeddings.shape
    tile = _tile(embeddings)
    launch(
        triton_kernels.forward,
        (-(-batch // tile["SAMPLES"]),),
        dense,
        embeddings,
        output,
        batch,
        tables + 1,
        width,
        output.shape[1],
        dense.stride(0),
        *embeddings.stride()[:2],
        **tile,
        EDGE=power_of_two(padding) if padding else 0,
        num_warps=_WARPS,
    )
    return output


def backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> tuple[Tensor | None, ...]:
    grads = empty_gradients(needs, dense, embeddings)
    if not any(grad is not None and grad.numel() for grad in grads):
        return grads
    grad_output, dense, embeddings = (
        readable(tensor) for tensor in (grad_output, dense, embeddings)
    )
    batch, tables, width = embeddings.shape
    tile = _tile(embeddings)
    launch(
        triton_kernels.backward,
        (-(-batch // tile["SAMPLES"]),),
        grad_output,
        dense,
        embeddings,
        *grads,
        batch,
        tables + 1,
        width,
        grad_output.stride(0),
        dense.stride(0),
        *embeddings.stride()[:2],
        **tile,
        num_warps=_WARPS,
    )
    return grads


def supports(dense: Tensor, embeddings: Tensor, padding: int) -> str | None:
    """A sample's products are one tile."""
    tables, width = embeddings.shape[1:] if embeddings.dim() == 3 else (0, 0)
    if tables + 1 > _MOST_VECTORS or width > _MOST_WIDTH:
        return f"it holds at most {_MOST_VECTORS} vectors of at most {_MOST_WIDTH} elements"
    return None


def supports_backward(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> str | None:
    return supports(dense, embeddings, 0)
