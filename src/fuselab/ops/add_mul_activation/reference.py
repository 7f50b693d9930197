"""act(input + scale * update + bias) in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops._shared import activations


def reference(
    input: Tensor,
    update: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "relu",
) -> Tensor:
    """Compute ``activation(input + scale * update + bias)``, element by element.

    Args:
        input: any shape ``(..., N)``, float32, float16, bfloat16 or float64, any strides.
        update: the shape of ``input``; a smaller tensor can be expanded, which costs no memory.
        bias: ``(N,)`` or None.
        scale: a number. It has no gradient. Under torch.compile one graph serves all values once
            they are dynamic (``dynamic=True``, or from the second value on).
        activation: identity, relu, leaky_relu (slope 0.01), gelu (erf), gelu_tanh, silu, sigmoid or
            tanh.

    Returns:
        The shape of ``input`` and the dtype that type promotion gives the tensors. The strides are
        those of ``torch.empty_like(input)``: those of ``input`` if it is dense, as in eager
        PyTorch, else contiguous in the order of its strides, even where eager would follow
        ``update``. Arithmetic is in float32, or in float64 for a float64 result; the result is
        rounded once.

    Differentiable twice in input, update and bias. The backward keeps the output (relu, leaky_relu,
    sigmoid, tanh), the operands (gelu, gelu_tanh, silu) or nothing (identity). It sums the gradient
    of the bias in an order that does not vary from run to run. That needs a second launch of 4 us,
    and the first one is slower than without sums: at 65536 x 512 on an H200 the backward reaches
    91 % of the limit in float32 and 88 % in bfloat16. ``add_mul_activation/configs.py`` has the
    reasons.

    Raises:
        ShapeError, DtypeError, UnknownNameError (activation, implementation), DeviceError,
        UnsupportedError (an implementation asked for by name that cannot run here).
    """
    total = input + scale * update
    if bias is not None:
        total = total + bias
    return activations.activation(activation).function(total)


def reference_in_place(
    input: Tensor,
    update: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "relu",
) -> Tensor:
    """Write the result of ``add_mul_activation`` over ``input`` and return it; for inference.

    Arguments and errors are those of ``add_mul_activation``. The result is rounded to the dtype of
    ``input``. An input whose elements are not dense in memory is written by a copy. There is no
    gradient; the version counter of ``input`` is increased, so that autograd sees the change.

    Raises:
        ArgumentError: elements of ``input`` share memory (an expanded tensor), or ``update`` or
            ``bias`` overlaps the memory of ``input``, even if the elements are the same.
        DifferentiationError: an argument requires a gradient.
    """
    return reference(input, update, bias, scale, activation).to(input.dtype)


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor | None,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float,
    activation: str,
    input_dtype: torch.dtype,
    update_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, update and bias.

    ``output`` is given for the activations whose derivative is a function of it; ``input``,
    ``update`` and ``bias`` for those that need the pre-activation; identity needs neither.
    Arithmetic is in float32, or in float64 if the upstream gradient is.
    """
    arithmetic = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    saved = output.to(arithmetic) if output is not None else grad_output
    if input is not None:
        saved = input.to(arithmetic)
        if update is not None:
            saved = saved + scale * update.to(arithmetic)
        if bias is not None:
            saved = saved + bias.to(arithmetic)
    upstream = grad_output.to(arithmetic)
    total = activations.activation(activation).pullback(upstream, saved)
    return (
        total.to(input_dtype) if needs[0] else None,
        (scale * total).to(update_dtype) if needs[1] else None,
        total.sum_to_size(total.shape[-1:]).to(bias_dtype) if needs[2] else None,
    )
