"""DLRM's dot interaction in plain PyTorch: the definition, and its gradient."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor


def reference(dense: Tensor, embeddings: Tensor, padding: int = 0) -> Tensor:
    """Compute the dense vector, followed by the dot product of every pair of a sample's vectors.

    With Z = [dense; embeddings], F = T + 1 vectors, the pairs are those below the diagonal of Z Zᵀ,
    row by row: (1, 0), (2, 0), (2, 1), (3, 0), ... (Naumov et al., arXiv:1906.00091).

    Args:
        dense: ``(B, D)``, float32, float16, bfloat16 or float64, any strides.
        embeddings: ``(B, T, D)`` in the same dtype, any strides; T may be 0.
        padding: this many columns of zeros follow, to give the next layer's input a convenient
            width: 1 turns DLRM's 367 columns into 368.

    Returns:
        ``(B, D + F (F - 1) / 2 + padding)``, contiguous, in the dtype of ``dense``. A fused kernel
        accumulates in float32 (float64 for float64). Float32 products are at least as exact as
        ``torch.backends.cuda.matmul.allow_tf32`` (or ``torch.set_float32_matmul_precision``) asks.

    Differentiable twice in both tensors. The backward keeps them, and nothing else. Tensors whose
    last dimension is not contiguous are copied first.

    Raises:
        ShapeError, DtypeError, ArgumentError (padding), UnknownNameError (implementation),
        DeviceError, UnsupportedError (an implementation asked for by name that cannot run here).
    """
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    row, column = _below_diagonal(vectors)
    zeros = products.new_zeros(products.shape[0], padding)
    return torch.cat([dense.to(products.dtype), products[:, row, column], zeros], dim=1)


def gradient(
    needs: Sequence[bool], grad_output: Tensor, dense: Tensor, embeddings: Tensor
) -> tuple[Tensor | None, ...]:
    """Return G Z + Gᵀ Z, with G the pairs' upstream gradients below the diagonal, and the dense
    vector's own upstream gradient added to its row."""
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    batch, count, width = vectors.shape
    row, column = _below_diagonal(vectors)
    pairs = grad_output[:, width : width + row.numel()]
    lower = grad_output.new_zeros(batch, count * count).index_copy(1, row * count + column, pairs)
    lower = lower.view(batch, count, count)
    total = torch.bmm(lower, vectors) + torch.bmm(lower.transpose(1, 2), vectors)
    return (
        total[:, 0] + grad_output[:, :width] if needs[0] else None,
        total[:, 1:].clone(memory_format=torch.contiguous_format) if needs[1] else None,
    )


def flat_indices(dense: Tensor, embeddings: Tensor, padding: int = 0) -> Tensor:
    """Compute the same as an expert writes it, with one cached index into the flattened products;
    the benchmark's peer."""
    vectors = torch.cat([dense.unsqueeze(1), embeddings], dim=1)
    products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
    pairs = products.index_select(1, _flat_places(vectors.shape[1], vectors.device))
    zeros = [products.new_zeros(products.shape[0], padding)] if padding else []
    return torch.cat([dense.to(products.dtype), pairs, *zeros], dim=1)


@functools.cache
def _flat_places(count: int, device: torch.device) -> Tensor:
    row, column = torch.tril_indices(count, count, -1, device=device).unbind()
    return row * count + column


def _below_diagonal(vectors: Tensor) -> tuple[Tensor, Tensor]:
    count = vectors.shape[1]
    row, column = torch.tril_indices(count, count, -1, device=vectors.device).unbind()
    return row, column
