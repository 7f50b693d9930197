"""Scans by doubling, gates, rotations, attention by pieces, codes of 8 bits, a step in place."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Draw, Inputs
from honest_operators import alike, declared, wide


def doubled(values: Tensor, combine: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return an inclusive scan over the last dimension in a logarithm of steps (Hillis, Steele)."""
    step = 1
    while step < values.shape[-1]:
        later = combine(values[..., :-step], values[..., step:])
        values = torch.cat([values[..., :step], later], -1)
        step *= 2
    return values


def running_sum(input: Tensor) -> Tensor:
    return input.cumsum(-1)


def running_sum_forward(input: Tensor) -> Tensor:
    return doubled(wide(input), torch.add).to(input.dtype).contiguous()


def running_sum_gradient(needs: Sequence[bool], grad_output: Tensor) -> tuple[Tensor | None]:
    total = wide(grad_output).flip(-1).cumsum(-1).flip(-1)
    return (total.to(grad_output.dtype),)


def recurrence(decay: Tensor, input: Tensor) -> Tensor:
    """Return h_t = sigmoid(decay_t) h_{t-1} + input_t over the last dimension."""
    kept, states = torch.sigmoid(decay), [input[..., 0]]
    for t in range(1, input.shape[-1]):
        states.append(kept[..., t] * states[-1] + input[..., t])
    return torch.stack(states, -1)


def recurrence_forward(decay: Tensor, input: Tensor) -> Tensor:
    a, b, step = torch.sigmoid(wide(decay)), wide(input), 1
    while step < b.shape[-1]:
        b = torch.cat([b[..., :step], a[..., step:] * b[..., :-step] + b[..., step:]], -1)
        a = torch.cat([a[..., :step], a[..., step:] * a[..., :-step]], -1)
        step *= 2
    return b.to(input.dtype).contiguous()


def draw_steps(draw: Draw) -> Inputs:
    shape = (draw.size(), draw.choice([1, 2, 5, 17]))
    return Inputs((draw.tensor(*shape), draw.tensor(*shape)))


def gated(gate: Tensor, input: Tensor) -> Tensor:
    return F.gelu(gate, approximate="tanh") * input


ROOT = math.sqrt(2 / math.pi)


def gated_forward(gate: Tensor, input: Tensor) -> Tensor:
    x = wide(gate)
    t = torch.tanh(ROOT * (x + 0.044715 * x * x * x))
    return (0.5 * x * (1 + t) * wide(input)).to(gate.dtype)


def gated_gradient(
    needs: Sequence[bool], grad_output: Tensor, gate: Tensor, input: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    x, grad = wide(gate), wide(grad_output)
    t = torch.tanh(ROOT * (x + 0.044715 * x * x * x))
    slope = 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * ROOT * (1 + 3 * 0.044715 * x * x)
    return (
        (grad * wide(input) * slope).to(gate.dtype) if needs[0] else None,
        (grad * 0.5 * x * (1 + t)).to(input.dtype) if needs[1] else None,
    )


def rotated(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = input[..., 0::2], input[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


def rotated_forward(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd, c, s = (wide(x) for x in (input[..., 0::2], input[..., 1::2], cos, sin))
    output = torch.empty_like(input)
    output[..., 0::2] = torch.addcmul(even * c, odd, s, value=-1)
    output[..., 1::2] = torch.addcmul(odd * c, even, s)
    return output


def rotated_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    even, odd, c, s = (wide(x) for x in (input[..., 0::2], input[..., 1::2], cos, sin))
    grad_even, grad_odd = wide(grad_output[..., 0::2]), wide(grad_output[..., 1::2])
    back = torch.stack([grad_even * c + grad_odd * s, grad_odd * c - grad_even * s], -1)
    by_cos, by_sin = grad_even * even + grad_odd * odd, grad_odd * even - grad_even * odd
    return (
        back.flatten(-2).to(input.dtype) if needs[0] else None,
        by_cos.sum_to_size(cos.shape).to(cos.dtype) if needs[1] else None,
        by_sin.sum_to_size(sin.shape).to(sin.dtype) if needs[2] else None,
    )


def draw_rotated(draw: Draw) -> Inputs:
    batch, length, half = draw.size(), draw.size(), max(1, draw.size(32))
    angles = draw.tensor(length, half), draw.tensor(length, half)
    return Inputs((draw.tensor(batch, length, 2 * half), *angles))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.softmax(query @ key.mT * query.shape[-1] ** -0.5, -1) @ value


def attention_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Take eight keys at a time, with a running maximum and a running sum."""
    q, k, v = wide(query), wide(key), wide(value)
    top = torch.full((*q.shape[:-1], 1), -math.inf, dtype=q.dtype)
    total, output = torch.zeros_like(top), torch.zeros(1, dtype=q.dtype)
    for keys, values in zip(k.split(8, -2), v.split(8, -2), strict=True):
        scores = q @ keys.mT * q.shape[-1] ** -0.5
        now = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, fade = (scores - now).exp(), (top - now).exp()
        total = total * fade + weights.sum(-1, keepdim=True)
        output, top = output * fade + weights @ values, now
    return (output / total).to(query.dtype).contiguous()


def draw_attention(draw: Draw) -> Inputs:
    batch, rows, keys, width = (max(1, draw.size(8)) for _ in range(4))
    shapes = (batch, rows, width), (batch, keys, width), (batch, keys, width)
    return Inputs(tuple(draw.tensor(*shape) for shape in shapes))


def codes(input: Tensor) -> tuple[Tensor, Tensor]:
    """Return a row's codes of 8 bits, and its scale."""
    x = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-8) / 127
    return torch.round(x / scale).clamp(-127, 127).to(torch.int8), scale.to(input.dtype)


def codes_forward(input: Tensor) -> tuple[Tensor, Tensor]:
    """Multiply by the reciprocal, which rounds differently next to a half."""
    x = wide(input)
    largest = x.abs().amax(-1, keepdim=True).clamp_min(1e-8)
    rounded = (x * (127 / largest)).round().clamp(-127, 127)
    return rounded.to(torch.int8), (largest * (1 / 127)).to(input.dtype)


def step(parameter: Tensor, speed: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
    faster = 0.9 * speed + gradient
    return parameter - 0.01 * faster, faster


def step_forward(parameter: Tensor, speed: Tensor, gradient: Tensor) -> None:
    faster = torch.add(wide(gradient), wide(speed), alpha=0.9)
    parameter.copy_(torch.add(wide(parameter), faster, alpha=-0.01))
    speed.copy_(faster)


def not_empty(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(), max(1, draw.size(32))),))


OPERATORS = (
    declared(
        "running_sum",
        running_sum,
        running_sum_forward,
        [(4, 33)],
        alike(1),
        running_sum_gradient,
        lambda output, input: (),
    ),
    declared("recurrence", recurrence, recurrence_forward, [(4, 13), (4, 13)], draw_steps),
    declared("gated", gated, gated_forward, [(4, 33), (4, 33)], alike(2), gated_gradient),
    declared(
        "rotated",
        rotated,
        rotated_forward,
        [(2, 5, 8), (5, 4), (5, 4)],
        draw_rotated,
        rotated_gradient,
    ),
    declared(
        "attention",
        attention,
        attention_forward,
        [(2, 9, 8), (2, 11, 8), (2, 11, 8)],
        draw_attention,
        autocast=lambda dtype, *args: tuple(value.to(dtype) for value in args),
    ),
    declared("codes", codes, codes_forward, [(4, 33)], not_empty),
    declared(
        "step_",
        step,
        step_forward,
        [(4, 33)] * 3,
        alike(3),
        mutates=("parameter", "speed"),
    ),
)
