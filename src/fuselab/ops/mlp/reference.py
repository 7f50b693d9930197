"""Linear layers with activations between and after them: the definition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.ops._shared import activations
from fuselab.ops._shared.matrices import as_rows


def names_of(weights: Sequence[Tensor], activation: str, output_activation: str) -> list[str]:
    """Return the name of the activation after each layer."""
    return [activation] * (len(weights) - 1) + [output_activation]


def reference(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    activation: str = "relu",
    output_activation: str = "identity",
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute a multilayer perceptron: for every layer ``hidden = act(hidden weightᵀ + bias)``.

    Args:
        input: any shape ``(..., K)`` of one dimension or more, any strides, in the dtype of the
            weights, or float32 with weights of 16 bits; then each element is rounded first.
        weights: one or more of ``(N, K)``, K the N of the one before, of one dtype (float32,
            float16, bfloat16 or float64).
        biases: one ``(N,)`` per weight, in their dtype, or none at all.
        activation: after every layer but the last: identity, relu, leaky_relu (slope 0.01), gelu
            (erf), gelu_tanh, silu, sigmoid or tanh.
        output_activation: after the last layer.
        dtype: of the output: None for the weights' dtype, or float32. The last layer's sums are
            rounded to it before their activation.

    Returns:
        ``(..., N)`` of the last layer, contiguous.

    In one launch, hidden activations never leave the chip; they are rounded to the weights' dtype
    as in a chain of ``linear_activation``. If a gradient is needed, ``"auto"`` is that chain, which
    keeps them. An implementation asked for by name keeps none: its backward computes the layers
    again in plain PyTorch.

    There is no Triton kernel for all layers: Triton cannot keep activations whose width is only
    known at run time in shared memory from one product to the next. ``"triton"`` is the chain by
    Triton's ``linear_activation``, ``"layers"`` the chain by its best implementation.

    Raises:
        ArgumentError (no weights, another number of biases), ShapeError, DtypeError,
        UnknownNameError (activation, implementation), DeviceError, UnsupportedError (an
        implementation asked for by name that cannot run here).
    """
    names = names_of(weights, activation, output_activation)
    hidden = input.to(weights[0].dtype)
    for place, name in enumerate(names):
        hidden = F.linear(hidden, weights[place], biases[place] if biases else None)
        if place == len(weights) - 1:
            hidden = hidden.to(dtype or hidden.dtype)
        hidden = activations.activation(name).function(hidden)
    return hidden


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str,
    output_activation: str,
    dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weights and biases, after computing the layers again.
    Pullbacks and the biases' sums are in float32 (float64 if the weights are), products in the
    weights' dtype."""
    count, own = len(weights), weights[0].dtype
    names = names_of(weights, activation, output_activation)
    inputs, saved = [input.to(own)], []
    for place, name in enumerate(names):
        total = F.linear(inputs[-1], weights[place], biases[place] if biases else None)
        if place == count - 1:
            total = total.to(dtype or own)
        entry = activations.activation(name)
        inputs.append(entry.function(total))
        saved.append(inputs[-1] if entry.derivative_of == "output" else total)
    of_weights: list[Tensor | None] = [None] * count
    of_biases: list[Tensor | None] = [None] * len(biases)
    arithmetic = torch.float64 if own == torch.float64 else torch.float32
    grad = grad_output
    for place in reversed(range(count)):
        pullback = activations.activation(names[place]).pullback
        exact = as_rows(pullback(grad.to(arithmetic), saved[place].to(arithmetic)))
        rows = exact.to(own)
        if needs[1 + place]:
            of_weights[place] = torch.mm(rows.t(), as_rows(inputs[place]))
        if biases and needs[1 + count + place]:
            of_biases[place] = exact.sum(0).to(own)
        grad = torch.mm(rows, weights[place]).view(inputs[place].shape)
    return grad.to(input.dtype) if needs[0] else None, *of_weights, *of_biases
