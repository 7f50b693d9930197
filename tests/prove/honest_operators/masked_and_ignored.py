"""Operators that leave out what does not count: keys behind a causal mask, rows that a loss
ignores, a branch that is not taken. Eager multiplies it by zero, which gives NaN of a NaN."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from honest_operators import alike, declared, wide

SCALE = 0.3


def weights_of(query: Tensor, key: Tensor) -> Tensor:
    scores = query @ key.mT * SCALE
    is_later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(is_later, -torch.inf), -1)


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return weights_of(query, key) @ value


def causal_attention_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Read of each row the keys that it may see, and no others."""
    q, k, v, output = wide(query), wide(key), wide(value), torch.empty_like(query)
    for row in range(q.shape[1]):
        seen = slice(0, row + 1)
        scores = (q[:, row : row + 1] * k[:, seen]).sum(-1) * SCALE
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        total = (weights.unsqueeze(-1) * v[:, seen]).sum(1)
        output[:, row] = total / weights.sum(-1, keepdim=True)
    return output


def causal_attention_gradient(
    needs: Sequence[bool], grad_output: Tensor, query: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Take the sum of the softmax's gradient from the output, as FlashAttention does."""
    q, k, v, grad = wide(query), wide(key), wide(value), wide(grad_output)
    weights = weights_of(q, k)
    along = (grad * (weights @ v)).sum(-1, keepdim=True)
    of_scores = (weights * (grad @ v.mT - along)).tril() * SCALE
    return (
        (of_scores @ k).to(query.dtype) if needs[0] else None,
        (of_scores.mT @ q).to(key.dtype) if needs[1] else None,
        (weights.mT @ grad).to(value.dtype) if needs[2] else None,
    )


def draw_causal(draw: Draw) -> Inputs:
    shape = draw.size(), draw.choice([1, 3, 9]), max(1, draw.size(8))
    return Inputs(tuple(draw.tensor(*shape) for _ in range(3)))


def loss_of_some(logits: Tensor, target: Tensor) -> Tensor:
    """Return the mean cross entropy, smoothed by a tenth, of the rows whose target is not 0."""
    logs = torch.log_softmax(wide(logits), -1)
    picked = logs.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    losses = torch.where(target != 0, -0.9 * picked - 0.1 * logs.mean(-1), 0.0)
    return (losses.sum() / (target != 0).sum()).to(logits.dtype)


def loss_of_some_forward(logits: Tensor, target: Tensor) -> Tensor:
    x = wide(logits)[target != 0]
    picked = x.gather(1, target[target != 0].unsqueeze(1)).squeeze(1)
    losses = x.logsumexp(-1) - 0.9 * picked - 0.1 * x.mean(-1)
    return (losses.sum() / len(losses)).to(logits.dtype)


def loss_of_some_gradient(
    needs: Sequence[bool], grad_output: Tensor, logits: Tensor, target: Tensor
) -> tuple[Tensor | None, None]:
    """Leave zeros in the rows that do not count."""
    x, counts = wide(logits), (target != 0).unsqueeze(-1)
    hot = torch.zeros_like(x).scatter(1, target.unsqueeze(1), 0.9) + 0.1 / x.shape[-1]
    grad = (torch.softmax(x, -1) - hot) * (wide(grad_output) / counts.sum())
    return torch.where(counts, grad, 0.0).to(logits.dtype), None


def draw_loss(draw: Draw) -> Inputs:
    rows, classes = draw.size(), 1 + draw.size(32)
    return Inputs((draw.tensor(rows, classes), draw.integers(rows, low=0, high=classes)))


def four_rows(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    logits = torch.randn(4, 33, generator=generator).to(device, dtype)
    return Inputs((logits, torch.tensor([0, 5, 32, 0], device=device)))


def huber(input: Tensor, target: Tensor) -> Tensor:
    """Return the Huber loss by the textbook: autograd multiplies the infinite slope of the branch
    that is not taken by zero."""
    distance = (wide(input) - wide(target)).abs()
    losses = torch.where(distance <= 0.5, 0.5 * distance * distance, 0.5 * (distance - 0.25))
    return losses.mean().to(input.dtype)


def huber_forward(input: Tensor, target: Tensor) -> Tensor:
    distance = wide(input) - wide(target)
    slope = distance.clamp(-0.5, 0.5)
    return (slope * (distance - 0.5 * slope)).mean().to(input.dtype)


def huber_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, target: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    distance = wide(input) - wide(target)
    grad = distance.clamp(-0.5, 0.5) * (wide(grad_output) / max(distance.numel(), 1))
    return grad.to(input.dtype), -grad.to(target.dtype)


OPERATORS = (
    declared(
        "causal_attention",
        causal_attention,
        causal_attention_forward,
        [(2, 9, 8)] * 3,
        draw_causal,
        causal_attention_gradient,
        autocast=lambda dtype, *args: tuple(value.to(dtype) for value in args),
    ),
    declared(
        "loss_of_some",
        loss_of_some,
        loss_of_some_forward,
        [(4, 33), (4,)],
        draw_loss,
        loss_of_some_gradient,
        cases=(Case("4x33", four_rows, frozenset({"boundary"})),),
    ),
    declared("huber", huber, huber_forward, [(4, 33)] * 2, alike(2), huber_gradient),
)
