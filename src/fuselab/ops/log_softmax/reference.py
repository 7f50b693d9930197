"""log_softmax in plain PyTorch: what is right, its gradient, and how people spell it out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """x - max(x) - log(sum(exp(x - max(x)))) along ``dim``: ``torch.log_softmax``.

    Args:
        input: any shape, 0-D and empty included; any strides; floating, or any real dtype when
            ``dtype`` is given.
        dim: the dimension whose exponentials sum to 1; negative counts from the end.
        dtype: the input is cast to it first, and the result has it (float16, bfloat16, float32 or
            float64).

    Returns:
        A contiguous tensor of ``input``'s shape. A slice that holds NaN or +inf, or nothing but
        -inf, is NaN; beside finite elements, -inf stays -inf.

    Raises:
        DtypeError: ``input`` is not floating and no ``dtype`` is given, or ``dtype`` is not
            floating.
        ArgumentError: ``dim`` is out of range.
    """
    return torch.log_softmax(input, dim, dtype=dtype)


def log_softmax_(input: Tensor, dim: int = -1) -> Tensor:
    """``log_softmax`` written over its input, for inference; returns ``input``.

    Args:
        input: any shape, 0-D and empty included; floating. One that is not contiguous takes a
            workspace of its size; an expanded one is refused.
        dim: the dimension whose exponentials sum to 1; negative counts from the end.

    Raises:
        DtypeError: ``input`` is not floating.
        ArgumentError: ``dim`` is out of range, or ``input`` overlaps itself.
        DifferentiationError: ``input`` wants a gradient; ``log_softmax`` has one.
    """
    return torch.log_softmax(input, dim)


def log_softmax_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """grad_output - exp(output) * sum(grad_output) along ``dim``, in the input's dtype."""
    if not needs[0]:
        return (None,)
    grad = torch.ops.aten._log_softmax_backward_data(grad_output, output, dim, output.dtype)
    return (grad.to(input_dtype),)


def naive(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """The formula as it stands in model code."""
    if dtype is not None:
        input = input.to(dtype)
    return input - torch.logsumexp(input, dim, keepdim=True)
