"""act(input Wᵀ + b) in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.ops._shared import activations
from fuselab.ops._shared.matrices import as_rows


def reference(
    input: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str = "relu"
) -> Tensor:
    """Compute ``activation(input weightᵀ + bias)``: ``F.linear`` and an activation.

    Args:
        input: any shape ``(..., K)`` of one dimension or more, float32, float16, bfloat16 or
            float64, any strides.
        weight: ``(N, K)``, as ``nn.Linear`` keeps it, in the dtype of ``input``, any strides.
        bias: ``(N,)`` or None, in the same dtype.
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh.

    Returns:
        ``(..., N)``, contiguous, in the dtype of ``input``. A fused kernel accumulates in float32
        and rounds once, after the activation. Float32 products are as exact as
        ``torch.backends.cuda.matmul.allow_tf32`` (or ``torch.set_float32_matmul_precision``) says.

    Differentiable twice in input, weight and bias. The backward keeps input, weight and, for relu,
    leaky_relu, sigmoid and tanh, the output; for gelu, gelu_tanh and silu it computes the
    pre-activation again from input, weight and bias. The bias's gradient is summed in an order that
    does not vary from run to run. The other two gradients are products of ``torch.matmul``, as in
    eager PyTorch; for K up to 32 the weight's is summed in a fixed order too.

    Raises:
        ShapeError, DtypeError, UnknownNameError (activation, implementation), DeviceError,
        UnsupportedError (an implementation asked for by name that cannot run here).
    """
    return activations.activation(activation).function(F.linear(input, weight, bias))


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias.

    ``output`` is given for the activations whose derivative is a function of it, ``bias`` for those
    that need the pre-activation; otherwise they are None. The pullback and the bias's sum are in
    float32 (float64 if the gradient is), the products in the operands' dtype.
    """
    exact = activations.pulled_back(
        activation, grad_output, output, lambda: F.linear(input, weight, bias)
    )
    total = as_rows(exact)
    rows = total.to(grad_output.dtype)
    return (
        torch.mm(rows, weight).view(input.shape) if needs[0] else None,
        torch.mm(rows.t(), as_rows(input)) if needs[1] else None,
        total.sum(0).to(grad_output.dtype) if needs[2] else None,
    )
