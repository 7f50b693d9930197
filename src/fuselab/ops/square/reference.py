"""input * input in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(input: Tensor) -> Tensor:
    """Compute ``input * input`` element by element, as ``torch.square``.

    Args:
        input: any shape, float32, float16, bfloat16 or float64, any strides.

    Returns:
        The shape and dtype of ``input`` and the strides of ``torch.empty_like(input)``. Arithmetic
        is in float32, or in float64 for a float64 input; the result is rounded once.

    Differentiable twice: the gradient is 2 g x.

    Raises:
        DtypeError, UnknownNameError (implementation), UnsupportedError (an implementation asked for
        by name that cannot run here).
    """
    return torch.square(input)


def gradient(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    """Return the gradient of input, computed in float32, or in float64 if the input is."""
    arithmetic = torch.float64 if input.dtype == torch.float64 else torch.float32
    slope = 2 * input.to(arithmetic)
    return ((grad_output.to(arithmetic) * slope).to(input.dtype) if needs[0] else None,)
