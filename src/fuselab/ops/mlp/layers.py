"""The chain: one call of ``linear_activation`` per layer, which autograd can follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation import linear_activation
from fuselab.ops.linear_sigmoid import linear_sigmoid
from fuselab.ops.mlp.reference import names_of


def forward(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
    implementation: str = "auto",
) -> Tensor:
    """Every layer by ``implementation`` of linear_activation (of linear_sigmoid a last one of width
    1); a ``dtype`` that is asked for takes a pass of PyTorch's over the output."""
    hidden = input.to(weights[0].dtype)
    names = names_of(weights, activation, output_activation)
    if dtype is not None:
        names[-1] = "identity"
    for place, (weight, name) in enumerate(zip(weights, names, strict=True)):
        bias = biases[place] if biases else None
        if name == "sigmoid" and weight.shape[0] == 1:
            hidden = linear_sigmoid(hidden, weight, bias, implementation=implementation)
        else:
            hidden = linear_activation(hidden, weight, bias, name, implementation=implementation)
    if dtype is None:
        return hidden
    return activation_named(output_activation).function(hidden.to(dtype))
