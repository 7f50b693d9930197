"""The definition of ``rrelu`` in evaluation, where its slope is the mean of the two bounds.

In training PyTorch draws a slope for every element; that call stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _in_evaluation(
    input: Tensor,
    noise: Tensor,
    lower: float = 1 / 8,
    upper: float = 1 / 3,
    training: bool = False,
    generator: Any = None,
) -> Any:
    if training:
        return NotImplemented
    return aten.leaky_relu(input, (lower + upper) / 2), noise


def _gradient(
    grad_output: Tensor,
    input: Tensor,
    noise: Tensor,
    lower: float,
    upper: float,
    training: bool,
    self_is_result: bool,
) -> Any:
    if training:
        return NotImplemented
    return aten.leaky_relu_backward(grad_output, input, (lower + upper) / 2, self_is_result)


DEFINITIONS: dict[Any, Callable[..., Any]] = {
    aten.rrelu_with_noise_functional.default: _in_evaluation,
    aten.rrelu_with_noise_backward.default: _gradient,
}
