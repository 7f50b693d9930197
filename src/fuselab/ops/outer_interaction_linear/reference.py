"""DLRM's outer product interaction and its linear layer in plain PyTorch: the definition."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.ops._shared import activations


def reference(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "identity",
) -> Tensor:
    """Compute ``activation(outer weightᵀ + bias)``, ``outer`` all products of a sample's elements.

    With z = [dense; embeddings] as one row of K = (T + 1) D numbers, ``outer`` is z zᵀ row by row,
    K² numbers: the outer interaction of ``fuselab.models.dlrm``.

    Args:
        dense: ``(B, D)``, float32, float16, bfloat16 or float64, any strides.
        embeddings: ``(B, T, D)``, any strides; T may be 0.
        weight: ``(N, K²)``, as the ``nn.Linear`` after the interaction has it.
        bias: ``(N,)`` or None. All four have one dtype.
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh.

    Returns:
        ``(B, N)``, contiguous. Because z_i z_j = z_j z_i, a fused kernel adds weight[i, j] to
        weight[j, i] first and multiplies half as often. Sums of weights and products of z are
        rounded to the inputs' dtype, and accumulated in float32 (float64 by ``cpp``, else by the
        reference).
        Float32 products are as exact as ``torch.backends.cuda.matmul.allow_tf32`` (or
        ``torch.set_float32_matmul_precision``) says; ``cublas`` serves both settings.

        The workspace never has B x K² numbers. ``triton`` and ``wgmma`` need the sums of weights, a
        piece of up to 38 MB at a time (or 64 K per output, if that is more), and as many float32
        copies of the output (forward) or of z (backward) as it takes programs to fill the GPU. At
        2048 x 26 x 16 -> 512 in 16 bits that is 54 MB forward and 34 MB backward, 55 MB if the
        pre-activation is computed again. The backward keeps the sums in the weight's gradient until
        that is written; if that gradient is not asked for, they take 36 or 72 MB more. ``cublas``
        needs products and sums of a chunk of pairs, up to 87 MB (or 8 KB per sample and output, if
        that is more), and besides the output, or as many copies of z as it takes programs to fill
        the GPU, or z and the output's gradient transposed: 94 MB forward and up to 105 MB backward
        at that size. In float32 ``cpp`` needs 4 MB forward (from 384 samples on 16 KB per
        sample more), and backward z's gradient and 8 MB, or more for K above 1,000.

    Differentiable twice in all four tensors. The backward keeps them, and the output if the
    activation's derivative is a function of it; for gelu, gelu_tanh and silu it computes the
    pre-activation again. All sums have a fixed order; in deterministic mode cuBLAS needs
    CUBLAS_WORKSPACE_CONFIG, as it does for PyTorch's own products.

    Raises:
        ShapeError, DtypeError, UnknownNameError (activation, implementation), DeviceError,
        UnsupportedError (an implementation asked for by name that cannot run here).
    """
    row = torch.cat([dense, embeddings.flatten(1)], dim=1)
    outer = (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)
    return activations.activation(activation).function(F.linear(outer, weight, bias))


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of dense, embeddings, weight and bias.

    ``output`` is given for the activations whose derivative is a function of it. The pullback and
    the bias's sum are in float32 (float64 if the gradient is), the products in the operands' dtype.
    """
    row = torch.cat([dense, embeddings.flatten(1)], dim=1)
    batch, width = row.shape
    outer = (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)
    wide = activations.pulled_back(
        activation, grad_output, output, lambda: F.linear(outer, weight, bias)
    )
    total = wide.to(grad_output.dtype)
    grad_row = torch.empty(0)
    if needs[0] or needs[1]:
        square = torch.mm(total, weight).view(batch, width, width)
        grad_row = (square * row.unsqueeze(1)).sum(2) + (square * row.unsqueeze(2)).sum(1)
    first = dense.shape[1]
    return (
        grad_row[:, :first].clone(memory_format=torch.contiguous_format) if needs[0] else None,
        grad_row[:, first:].reshape(embeddings.shape).clone(memory_format=torch.contiguous_format)
        if needs[1]
        else None,
        torch.mm(total.t(), outer) if needs[2] else None,
        wide.sum(0).to(grad_output.dtype) if needs[3] else None,
    )
