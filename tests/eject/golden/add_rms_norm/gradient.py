"""The gradient of add_rms_norm as PyTorch formulas; second derivatives are theirs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.runtime.sweep import arithmetic_dtype

aten = torch.ops.aten


def gradient(
    needs: Sequence[bool],
    grad_output: Sequence[Tensor],
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    hidden: Tensor,
) -> tuple[Tensor | None, ...]:
    """Return the gradient of each argument, computed in float32 for 16-bit tensors.

    What the forward has computed (``hidden``) is computed again, such that second derivatives
    flow through it.
    """
    grad_hidden, grad_normed = grad_output
    arithmetic = arithmetic_dtype(grad_hidden, grad_normed)
    dtypes = [tensor.dtype for tensor in (x, residual, weight)]
    x = x.to(arithmetic)
    residual = residual.to(arithmetic)
    weight = weight.to(arithmetic)
    grad_hidden = grad_hidden.to(arithmetic)
    grad_normed = grad_normed.to(arithmetic)
    batch = x.shape[0]
    length = x.shape[1]
    width = x.shape[2]
    add = aten.add.Tensor(x, residual)
    pow_1 = aten.pow.Tensor_Scalar(add, 2)
    mean = aten.mean.dim(pow_1, [-1], True)
    add_13 = aten.add.Tensor(mean, 1e-06)
    rsqrt = aten.rsqrt.default(add_13)
    mul_16 = aten.mul.Tensor(add, rsqrt)
    mul_24 = aten.mul.Tensor(grad_normed, mul_16)
    mul_25 = aten.mul.Tensor(grad_normed, weight)
    sum_1 = aten.sum.dim_IntList(mul_24, [0, 1], True)
    view = aten.reshape.default(sum_1, [width])
    mul_26 = aten.mul.Tensor(mul_25, add)
    mul_27 = aten.mul.Tensor(mul_25, rsqrt)
    sum_2 = aten.sum.dim_IntList(mul_26, [2], True)
    add_34 = aten.add.Tensor(grad_hidden, mul_27)
    pow_2 = aten.pow.Tensor_Scalar(rsqrt, 3)
    mul_28 = aten.mul.Scalar(sum_2, -0.5)
    mul_29 = aten.mul.Tensor(mul_28, pow_2)
    expand = aten.expand.default(mul_29, [batch, length, width])
    div = aten.div.Scalar(expand, width)
    pow_3 = aten.pow.Tensor_Scalar(add, 1.0)
    mul_30 = aten.mul.Scalar(pow_3, 2.0)
    mul_31 = aten.mul.Tensor(div, mul_30)
    add_35 = aten.add.Tensor(add_34, mul_31)
    return (
        add_35.to(dtypes[0]) if needs[0] else None,
        add_35.to(dtypes[1]) if needs[1] else None,
        view.to(dtypes[2]) if needs[2] else None,
    )
