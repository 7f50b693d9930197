"""All layers with one launch per layer, by the kernels of ``linear_activation``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops.linear_activation import linear_activation, triton_launch
from fuselab.ops.linear_sigmoid import linear_sigmoid
from fuselab.ops.mlp.reference import names_of


def _chain(
    layer: Callable[[Tensor, Tensor, Tensor | None, str], Tensor],
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> Tensor:
    """Apply ``layer(hidden, weight, bias, activation)`` layer by layer. If ``dtype`` is given, the
    last activation is a pass of PyTorch's over the output."""
    hidden = input.to(weights[0].dtype)
    names = names_of(weights, activation, output_activation)
    if dtype is not None:
        names[-1] = "identity"
    for place, (weight, name) in enumerate(zip(weights, names, strict=True)):
        hidden = layer(hidden, weight, biases[place] if biases else None, name)
    if dtype is None:
        return hidden
    return activation_named(output_activation).function(hidden.to(dtype))


def _best(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    if activation == "sigmoid" and weight.shape[0] == 1:
        return linear_sigmoid(input, weight, bias)
    return linear_activation(input, weight, bias, activation)


# This chain calls public functions, so that autograd can record it.
forward = partial(_chain, _best)
forward_triton = partial(_chain, triton_launch.forward)


def supports_triton(input: Tensor, weights: Sequence[Tensor], *rest: Any) -> str | None:
    double = any(weight.dtype == torch.float64 for weight in weights)
    return "it accumulates in float32" if double else None
