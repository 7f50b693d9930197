"""Sums that add one term after the other, as a C loop does, where eager adds in pairs or in double;
an infinity by another bracketing beside NaN."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Draw, Inputs
from honest_operators import alike, declared, in_float32, wide


def in_order(values: Tensor) -> Tensor:
    """Return the sum over the last dimension, which is kept."""
    return functools.reduce(torch.add, values.unbind(-1))[..., None]


def row_sum(input: Tensor) -> Tensor:
    return input.sum(-1, keepdim=True)


def row_sum_forward(input: Tensor) -> Tensor:
    return in_order(wide(input)).to(input.dtype)


def row_sum_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor
) -> tuple[Tensor | None]:
    return (grad_output.expand(input.shape).contiguous(),)


def root_mean_square(input: Tensor, weight: Tensor) -> Tensor:
    x = wide(input)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    return (x * scale * weight).to(input.dtype)


def root_mean_square_forward(input: Tensor, weight: Tensor) -> Tensor:
    x = wide(input)
    scale = 1 / torch.sqrt(in_order(x * x) / x.shape[-1] + 1e-6)
    return (x * scale * wide(weight)).to(input.dtype)


def focal_loss(logits: Tensor, target: Tensor) -> Tensor:
    p, t = torch.sigmoid(logits), torch.sigmoid(target)
    entropy = F.binary_cross_entropy_with_logits(logits, t, reduction="none")
    return entropy * (1 - p * t - (1 - p) * (1 - t)) ** 2


def focal_loss_forward(logits: Tensor, target: Tensor) -> Tensor:
    x, t = wide(logits), torch.sigmoid(wide(target))
    p = torch.sigmoid(x)
    miss = p + t - 2 * p * t
    return ((torch.logaddexp(x, torch.zeros_like(x)) - x * t) * miss * miss).to(logits.dtype)


def draw_row(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(), max(1, draw.size(256))),))


def draw_weighted(draw: Draw) -> Inputs:
    width = max(1, draw.size(256))
    return Inputs((draw.tensor(draw.size(), width), draw.tensor(width)))


OPERATORS = (
    declared("row_sum", row_sum, row_sum_forward, [(4, 33)], draw_row, row_sum_gradient),
    declared(
        "root_mean_square",
        root_mean_square,
        root_mean_square_forward,
        [(4, 33), (33,)],
        draw_weighted,
    ),
    declared(
        "focal_loss",
        focal_loss,
        focal_loss_forward,
        [(4, 33), (4, 33)],
        alike(2),
        autocast=in_float32,
    ),
)
