"""Gradients that are not autograd's: of an operator that passes none to an argument, whose gradient
is not the derivative of its values, and of one whose reference loses it in a branch not taken."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fuselab.op import Draw, Gradient, Inputs
from honest_operators import alike, declared, wide


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


def elu(input: Tensor) -> Tensor:
    """Return the ELU, for which autograd gives NaN where the exponential overflows."""
    return torch.where(input > 0, input, torch.expm1(input))


def elu_forward(input: Tensor) -> Tensor:
    x = wide(input)
    return torch.where(x > 0, x, torch.expm1(x)).to(input.dtype)


def elu_gradient(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor | None]:
    x = wide(input)
    return ((torch.where(x > 0, 1.0, torch.exp(x)) * wide(grad_output)).to(input.dtype),)


def log_odds(input: Tensor) -> Tensor:
    """Return log(1 + exp(-x)) by softplus, which returns its argument above a threshold."""
    return torch.nn.functional.softplus(-input)


def log_odds_forward(input: Tensor) -> Tensor:
    x = wide(input)
    return ((-x).clamp_min(0) + torch.log1p(torch.exp(-x.abs()))).to(input.dtype)


def log_odds_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor
) -> tuple[Tensor | None]:
    return ((-torch.sigmoid(-wide(input)) * wide(grad_output)).to(input.dtype),)


OPERATORS = (
    replace(_HELD, gradient=_GRADIENT),
    declared("elu", elu, elu_forward, [(4, 33)], alike(1), elu_gradient),
    declared("log_odds", log_odds, log_odds_forward, [(4, 33)], alike(1), log_odds_gradient),
)
