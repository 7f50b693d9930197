"""The gradient of dropped_residual as PyTorch formulas; second derivatives are theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.runtime.dropout import dropout_mask
from fuselab.runtime.sweep import arithmetic_dtype

aten = torch.ops.aten


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    seed: Tensor,
    dropout_kept: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument, computed in float32 for 16-bit tensors.

    What the forward has computed (``dropout_kept``) is computed again, such that second derivatives
    flow through it.
    """
    arithmetic = arithmetic_dtype(grad_output)
    dtypes = [tensor.dtype for tensor in (x, residual, weight, bias)]
    x = x.to(arithmetic)
    residual = residual.to(arithmetic)
    weight = weight.to(arithmetic)
    bias = bias.to(arithmetic)
    grad_output = grad_output.to(arithmetic)
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    kept = dropout_mask(seed, 0, [batch, length, width], 0.1)
    _to_copy = aten._to_copy.default(kept, dtype=arithmetic)
    mul_5 = aten.mul.Tensor(x, _to_copy)
    mul_9 = aten.mul.Tensor(mul_5, 1.1111111111111112)
    add_16 = aten.add.Tensor(mul_9, residual)
    native_layer_norm = aten.native_layer_norm.default(add_16, [width], weight, bias, 1e-05)
    getitem_1 = native_layer_norm[1]
    getitem_2 = native_layer_norm[2]
    native_layer_norm_backward = aten.native_layer_norm_backward.default(
        grad_output, add_16, [width], getitem_1, getitem_2, weight, bias, [True, True, True]
    )
    getitem_3 = native_layer_norm_backward[0]
    getitem_4 = native_layer_norm_backward[1]
    getitem_5 = native_layer_norm_backward[2]
    mul_23 = aten.mul.Tensor(getitem_3, 1.1111111111111112)
    mul_24 = aten.mul.Tensor(mul_23, _to_copy)
    return (
        mul_24.to(dtypes[0]) if needs[0] else None,
        getitem_3.to(dtypes[1]) if needs[1] else None,
        getitem_4.to(dtypes[2]) if needs[2] else None,
        getitem_5.to(dtypes[3]) if needs[3] else None,
        None,
    )


def residuals(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, seed: Tensor
) -> tuple[Tensor]:
    """Return what the forward keeps for the backward: dropout_kept."""
    arithmetic = arithmetic_dtype(x, residual, weight, bias, seed)
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    kept = dropout_mask(seed, 0, [batch, length, width], 0.1)
    return (
        kept.reshape((batch, length, width)).contiguous(),
    )
