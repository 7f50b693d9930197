"""act(input + bias) in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops._shared import activations
from fuselab.ops.add_mul_activation import reference as add_mul


def reference(input: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    """Compute ``activation(input + bias)``, element by element.

    Args:
        input: any shape ``(..., N)`` of one dimension or more, float32, float16, bfloat16 or
            float64, any strides.
        bias: ``(N,)``.
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh.

    Returns:
        The shape of ``input`` and the dtype that type promotion gives both. The strides are those
        of ``torch.empty_like(input)``: those of ``input`` if it is dense, as in eager PyTorch, else
        contiguous in the order of its strides. Arithmetic is in float32, or in float64 for a
        float64 result; the result is rounded once.

    Differentiable twice in input and bias. The backward keeps the output (relu, leaky_relu,
    sigmoid, tanh), the operands (gelu, gelu_tanh, silu) or nothing (identity). It sums the gradient
    of the bias in an order that does not vary from run to run. That needs a second launch of 4 us,
    and the first one is slower than without sums: at 65536 x 512 on an H200 the backward reaches
    92 % of the limit in float32 and 88 % in bfloat16. ``add_mul_activation/configs.py`` has the
    reasons.

    Raises:
        ShapeError, DtypeError, UnknownNameError (activation, implementation), DeviceError,
        UnsupportedError (an implementation asked for by name that cannot run here).
    """
    return activations.activation(activation).function(input + bias)


def reference_in_place(input: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    """Write the result of ``bias_activation`` over ``input`` and return it; for inference.

    Arguments and errors are those of ``bias_activation``. The result is rounded to the dtype of
    ``input``. An input whose elements are not dense in memory is written by a copy. There is no
    gradient; the version counter of ``input`` is increased, so that autograd sees the change.

    Raises:
        ArgumentError: elements of ``input`` share memory (an expanded tensor), or ``bias`` overlaps
            the memory of ``input``.
        DifferentiationError: an argument requires a gradient.
    """
    return reference(input, bias, activation).to(input.dtype)


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor | None,
    bias: Tensor | None,
    activation: str,
    input_dtype: torch.dtype,
    bias_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input and bias.

    ``output`` is given for the activations whose derivative is a function of it; ``input`` and
    ``bias`` for those that need the pre-activation; identity needs neither. Arithmetic is in
    float32, or in float64 if the upstream gradient is.
    """
    operands, dtypes = (output, input, None, bias), (input_dtype, None, bias_dtype)
    with_update = (needs[0], False, needs[1])
    grads = add_mul.gradient(with_update, grad_output, *operands, 1.0, activation, *dtypes)
    return grads[0], grads[2]
