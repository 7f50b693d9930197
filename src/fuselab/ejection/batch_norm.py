"""Batch normalisation and its gradient by simpler operators, such that no elements give no NaN."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._prims_common import get_computation_dtype


def batch_norm_backward(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    is_training: bool,
    eps: float,
    needs: Sequence[bool],
) -> tuple[Tensor | None, ...]:
    """Return what aten.native_batch_norm_backward does: the gradients of input, weight and bias.

    With y the normalised input and d the upstream gradient, they are rstd w (d - mean(d) -
    y mean(d y)), sum(d y) and sum(d). PyTorch's definition multiplies the sum of d (x - mean) by
    rstd afterwards, which makes NaN of the sum of no elements, where eager gives 0.
    """
    dtype = get_computation_dtype(input.dtype)
    others = [dim for dim in range(input.ndim) if dim != 1]
    spread = [1, input.shape[1], *[1] * (input.ndim - 2)]
    if not is_training:
        assert running_mean is not None and running_variance is not None
        mean, rstd = running_mean, torch.rsqrt(running_variance.to(dtype) + eps)
    assert mean is not None and rstd is not None
    upstream, scale = grad_output.to(dtype), rstd.to(dtype).reshape(spread)
    normalised = (input.to(dtype) - mean.to(dtype).reshape(spread)) * scale
    grad_weight = (upstream * normalised).sum(others)
    grad_bias = upstream.sum(others)
    if weight is not None:
        scale = scale * weight.to(dtype).reshape(spread)
    grad_input = upstream
    if is_training:
        count = math.prod(input.shape[dim] for dim in others)
        along = normalised * (grad_weight / count).reshape(spread)
        grad_input = upstream - (grad_bias / count).reshape(spread) - along
    return (
        (grad_input * scale).to(input.dtype) if needs[0] else None,
        grad_weight.to(input.dtype if weight is None else weight.dtype) if needs[1] else None,
        grad_bias.to(input.dtype if weight is None else weight.dtype) if needs[2] else None,
    )


def normalised_batch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    is_training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what aten._native_batch_norm_legit.no_stats does: the result, mean and rstd.

    The mean and the variance of no elements are 0, so that the second derivatives are 0 too.
    """
    dtype = get_computation_dtype(input.dtype)
    others = [dim for dim in range(input.ndim) if dim != 1]
    spread = [1, input.shape[1], *[1] * (input.ndim - 2)]
    wide = input.to(dtype)
    # Counted by a sum: the tracer holds a size that it knows as a symbol to be 2 or more.
    count = torch.ones_like(wide).sum(others, keepdim=True).clamp(min=1)
    mean = wide.sum(others, keepdim=True) / count
    centred = wide - mean
    rstd = torch.rsqrt((centred * centred).sum(others, keepdim=True) / count + eps)
    output = centred * rstd
    output = output if weight is None else output * weight.to(dtype).reshape(spread)
    output = output if bias is None else output + bias.to(dtype).reshape(spread)
    return output.to(input.dtype), mean.flatten(), rstd.flatten()


Definitions = Mapping[Any, Callable[..., Any]]
GRADIENT: Definitions = {torch.ops.aten.native_batch_norm_backward.default: batch_norm_backward}
# Those of the formulas of a gradient, whose own derivatives have to be right.
IN_FORMULAS: Definitions = {
    **GRADIENT,
    torch.ops.aten._native_batch_norm_legit.no_stats: normalised_batch,
}
