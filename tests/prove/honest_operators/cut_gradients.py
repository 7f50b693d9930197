"""An operator that passes no gradient to an argument, and whose gradient is not the derivative of
its values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fuselab.op import Draw, Gradient, Inputs
from honest_operators import declared, wide


def held_gate(input: Tensor, weight: Tensor) -> Tensor:
    """Return the input times its sigmoid and a weight, to which no gradient flows."""
    return input * torch.sigmoid(input.detach()) * weight.detach()


def held_gate_forward(input: Tensor, weight: Tensor) -> Tensor:
    return (wide(input) * (torch.sigmoid(wide(input)) * wide(weight))).to(input.dtype)


def held_gate_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    slope = torch.sigmoid(wide(input.detach())) * wide(weight.detach())
    return (wide(grad_output) * slope).to(input.dtype) if needs[0] else None, None


def draw_gate(draw: Draw) -> Inputs:
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(shape[-1])))


def save(output: Tensor, input: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    return input, weight


_HELD = declared(
    "held_gate", held_gate, held_gate_forward, [(4, 33), (33,)], draw_gate, held_gate_gradient
)
_GRADIENT = Gradient(save, held_gate_gradient, non_differentiable=("weight",))
OPERATORS = (replace(_HELD, gradient=_GRADIENT),)
