"""input + other in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(input: Tensor, other: Tensor) -> Tensor:
    """``input + other``, element by element, as ``torch.add`` of two tensors.

    Args:
        input: any shape, float32, float16, bfloat16 or float64, any strides.
        other: likewise, of a shape that broadcasts with that of ``input``.

    Returns:
        The broadcast shape, the dtype that type promotion gives both (a tensor without dimensions
        promotes none that has some), and the strides of ``torch.empty_like`` of the first argument
        that has the broadcast shape; contiguous where neither has. Arithmetic is in float32, in
        float64 where the result is; the result is rounded once.

    Differentiable twice in both. A gradient is the upstream one, summed over what was broadcast in
    an order that does not vary from run to run: leading dimensions of a contiguous upstream
    gradient of 2^22 elements or more, down to 2 to 2048 elements, by kernels on a GPU, in float64;
    others by ``torch.Tensor.sum_to_size``.

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
    """Gradients of input and other: the upstream one itself where nothing was broadcast."""

    def summed(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return grad_output.sum_to_size(tuple(shape)).to(dtype)

    return (
        summed(input_shape, input_dtype) if needs[0] else None,
        summed(other_shape, other_dtype) if needs[1] else None,
    )
