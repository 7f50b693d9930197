"""input + other in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(input: Tensor, other: Tensor) -> Tensor:
    """Add ``input + other`` element by element, as ``torch.add`` does for two tensors.

    Args:
        input: any shape, float32, float16, bfloat16 or float64, any strides.
        other: the same dtypes, any strides, and a shape that broadcasts with that of ``input``.

    Returns:
        The broadcast shape and the dtype that type promotion gives (a tensor without dimensions
        does not promote one that has some). The strides are those of ``torch.empty_like`` of the
        first argument that has the broadcast shape; the result is contiguous if neither has.
        Arithmetic is in float32, or in float64 for a float64 result; the result is rounded once.

    Differentiable twice in both. A gradient is the upstream one, summed over the broadcast
    dimensions in an order that does not vary from run to run. On a GPU, kernels sum over leading
    dimensions in float64 if the upstream gradient is contiguous, has 2^22 elements or more, and 2
    to 2048 elements remain; all other sums are by ``torch.Tensor.sum_to_size``.

    Raises:
        ShapeError, DtypeError, UnknownNameError (implementation), DeviceError, UnsupportedError (an
        implementation asked for by name that cannot run here).
    """
    return torch.add(input, other)


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    input_dtype: torch.dtype,
    other_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input and other: the upstream one summed to each operand's shape."""

    def summed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return grad_output.sum_to_size(tuple(shape)).to(dtype)

    return (
        summed(input_shape, input_dtype) if needs[0] else None,
        summed(other_shape, other_dtype) if needs[1] else None,
    )
