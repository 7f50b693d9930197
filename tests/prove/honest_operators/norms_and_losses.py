"""Norms and losses: sums of squares, logarithms of sums, terms that cancel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Draw, Inputs
from honest_operators import alike, declared, in_float32, wide


def layer_norm(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(input, weight.shape, weight, bias, 1e-5)


def normed(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with mean 0 and variance 1, and one over their standard deviations."""
    x = wide(input)
    centred = x - x.sum(-1, keepdim=True) / x.shape[-1]
    rstd = torch.rsqrt((centred * centred).sum(-1, keepdim=True) / x.shape[-1] + 1e-5)
    return centred * rstd, rstd


def layer_norm_forward(input: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addcmul(wide(bias), normed(input)[0], wide(weight)).to(input.dtype)


def layer_norm_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    y, rstd = normed(input)
    grad = wide(grad_output)
    scaled = grad * wide(weight)
    grad_input = scaled - scaled.mean(-1, keepdim=True) - y * (scaled * y).mean(-1, keepdim=True)
    return (
        (rstd * grad_input).to(input.dtype) if needs[0] else None,
        (grad * y).sum_to_size(weight.shape).to(weight.dtype) if needs[1] else None,
        grad.sum_to_size(weight.shape).to(weight.dtype) if needs[2] else None,
    )


def draw_layer_norm(draw: Draw) -> Inputs:
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(shape[-1]), draw.tensor(shape[-1])))


def unit_rows(input: Tensor) -> Tensor:
    return F.normalize(input, dim=-1)


def unit_rows_forward(input: Tensor) -> Tensor:
    x = wide(input)
    return (x / (x * x).sum(-1, keepdim=True).sqrt().clamp_min(1e-12)).to(input.dtype)


def unit_rows_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor
) -> tuple[Tensor | None]:
    x, grad = wide(input), wide(grad_output)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    y = x / norm.clamp_min(1e-12)
    along = torch.where(norm > 1e-12, y * (grad * y).sum(-1, keepdim=True), 0)
    return (((grad - along) / norm.clamp_min(1e-12)).to(input.dtype),)


def soft_target_loss(logits: Tensor, target: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, torch.sigmoid(target))


def soft_target_loss_forward(logits: Tensor, target: Tensor) -> Tensor:
    x, share = wide(logits), torch.sigmoid(wide(target))
    terms = x.clamp_min(0) - x * share + torch.log1p(torch.exp(-x.abs()))
    return terms.mean().to(logits.dtype)


def soft_target_loss_gradient(
    needs: Sequence[bool], grad_output: Tensor, logits: Tensor, target: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    x, share = wide(logits), torch.sigmoid(wide(target))
    grad = wide(grad_output) / max(x.numel(), 1)
    return (
        ((torch.sigmoid(x) - share) * grad).to(logits.dtype) if needs[0] else None,
        (-x * share * (1 - share) * grad).to(target.dtype) if needs[1] else None,
    )


def divergence(input: Tensor, target: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of two softmaxes, per row."""
    logs = F.log_softmax(input, -1), F.log_softmax(target, -1)
    return F.kl_div(*logs, reduction="none", log_target=True).sum(-1)


def divergence_forward(input: Tensor, target: Tensor) -> Tensor:
    q, p = torch.log_softmax(wide(input), -1), torch.log_softmax(wide(target), -1)
    return (p.exp() * (p - q)).sum(-1).to(input.dtype)


def divergence_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, target: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    q, p = torch.log_softmax(wide(input), -1), torch.log_softmax(wide(target), -1)
    grad, weight = wide(grad_output).unsqueeze(-1), p.exp()
    mean = (weight * (p - q)).sum(-1, keepdim=True)
    return (
        ((q.exp() - weight) * grad).to(input.dtype) if needs[0] else None,
        (weight * (p - q - mean) * grad).to(target.dtype) if needs[1] else None,
    )


def cosine(input: Tensor, other: Tensor) -> Tensor:
    lengths = input.square().sum(-1).sqrt() * other.square().sum(-1).sqrt()
    return (input * other).sum(-1) / (lengths + 1e-6)


def cosine_forward(input: Tensor, other: Tensor) -> Tensor:
    """Add one column after the other, as a simple kernel does."""
    one, two = wide(input), wide(other)
    sums = torch.zeros(3, *one.shape[:-1], dtype=one.dtype)
    for a, b in zip(one.unbind(-1), two.unbind(-1), strict=True):
        sums += torch.stack([a * b, a * a, b * b])
    return (sums[0] / (sums[1].sqrt() * sums[2].sqrt() + 1e-6)).to(input.dtype)


def draw_narrow(draw: Draw) -> Inputs:
    shape = (draw.size(), draw.choice([1, 3, 33]))
    return Inputs((draw.tensor(*shape), draw.tensor(*shape)))


TWO = [(4, 33), (4, 33)]
OPERATORS = (
    declared(
        "layer_norm",
        layer_norm,
        layer_norm_forward,
        [(4, 33), (33,), (33,)],
        draw_layer_norm,
        layer_norm_gradient,
        lambda output, input, weight, bias: (input, weight),
    ),
    declared("unit_rows", unit_rows, unit_rows_forward, [(4, 33)], alike(1), unit_rows_gradient),
    declared(
        "soft_target_loss",
        soft_target_loss,
        soft_target_loss_forward,
        TWO,
        alike(2),
        soft_target_loss_gradient,
        autocast=in_float32,
    ),
    declared(
        "divergence",
        divergence,
        divergence_forward,
        TWO,
        alike(2),
        divergence_gradient,
        autocast=in_float32,
    ),
    declared("cosine", cosine, cosine_forward, TWO, draw_narrow),
)
