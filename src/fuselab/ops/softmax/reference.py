"""softmax and log_softmax in plain PyTorch: the definitions, their gradients, common spellings."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute exp(x - max(x)) / sum(exp(x - max(x))) along ``dim``, as ``torch.softmax``.

    Args:
        input: any shape, 0-D and empty included, and any strides. It is floating, or of any real
            dtype if ``dtype`` is given.
        dim: the dimension that sums to 1; negative counts from the end.
        dtype: the input is cast to it first, and it is the result's dtype (float16, bfloat16,
            float32 or float64).

    Returns:
        A contiguous tensor of ``input``'s shape. A slice that contains NaN or +inf, or only -inf,
        is NaN.

    Raises:
        DtypeError: ``input`` is not floating and no ``dtype`` is given, or ``dtype`` is not
            floating.
        ArgumentError: ``dim`` is out of range.
    """
    return torch.softmax(input, dim, dtype=dtype)


def softmax_(input: Tensor, dim: int = -1) -> Tensor:
    """Write ``softmax`` of ``input`` over ``input``, for inference, and return it.

    Args:
        input: any shape, 0-D and empty included; floating. One that is not contiguous takes a
            workspace of its size; an expanded one is refused.
        dim: the dimension that sums to 1; negative counts from the end.

    Raises:
        DtypeError: ``input`` is not floating.
        ArgumentError: ``dim`` is out of range, or ``input`` overlaps itself.
        DifferentiationError: ``input`` requires a gradient; ``softmax`` supports one.
    """
    return torch.softmax(input, dim)


def softmax_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return output * (grad_output - sum(grad_output * output)) along ``dim``, in the input's
    dtype."""
    by = torch.ops.aten._softmax_backward_data
    return (by(grad_output, output, dim, output.dtype).to(input_dtype) if needs[0] else None,)


def naive_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the formula as model code spells it: five operators, eight passes over memory.

    The maximum is detached, because its gradient is 0 and a compiled backward without detach() is
    off by 100 to 900 ulp (H200).
    """
    if dtype is not None:
        input = input.to(dtype)
    term = torch.exp(input - input.detach().max(dim=dim, keepdim=True).values)
    return term / term.sum(dim=dim, keepdim=True)


def log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute x - max(x) - log(sum(exp(x - max(x)))) along ``dim``, as ``torch.log_softmax``.

    Args:
        input: any shape, 0-D and empty included, and any strides. It is floating, or of any real
            dtype if ``dtype`` is given.
        dim: the dimension whose exponentials sum to 1; negative counts from the end.
        dtype: the input is cast to it first, and it is the result's dtype (float16, bfloat16,
            float32 or float64).

    Returns:
        A contiguous tensor of ``input``'s shape. A slice that contains NaN or +inf, or only -inf,
        is NaN; among finite elements, -inf stays -inf.

    Raises:
        DtypeError: ``input`` is not floating and no ``dtype`` is given, or ``dtype`` is not
            floating.
        ArgumentError: ``dim`` is out of range.
    """
    return torch.log_softmax(input, dim, dtype=dtype)


def log_softmax_(input: Tensor, dim: int = -1) -> Tensor:
    """Write ``log_softmax`` of ``input`` over ``input``, for inference, and return it.

    Args:
        input: any shape, 0-D and empty included; floating. One that is not contiguous takes a
            workspace of its size; an expanded one is refused.
        dim: the dimension whose exponentials sum to 1; negative counts from the end.

    Raises:
        DtypeError: ``input`` is not floating.
        ArgumentError: ``dim`` is out of range, or ``input`` overlaps itself.
        DifferentiationError: ``input`` requires a gradient; ``log_softmax`` supports one.
    """
    return torch.log_softmax(input, dim)


def log_softmax_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return grad_output - exp(output) * sum(grad_output) along ``dim``, in the input's dtype."""
    by = torch.ops.aten._log_softmax_backward_data
    return (by(grad_output, output, dim, output.dtype).to(input_dtype) if needs[0] else None,)


def naive_log_softmax(input: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """Compute the formula as model code spells it."""
    if dtype is not None:
        input = input.to(dtype)
    return input - torch.logsumexp(input, dim, keepdim=True)
