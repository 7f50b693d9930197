"""Rotary embeddings, gates, attention pieces, losses of rows and recurrences."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from honest_operators import alike, declared, in_float32, wide

Pair = tuple[Tensor | None, Tensor | None]


def rms_norm(input: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return F.rms_norm(input, weight.shape, weight, eps)


def rms_norm_forward(input: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = wide(input)
    mean = (x * x).sum(-1, keepdim=True) * (1 / x.shape[-1] if x.shape[-1] else 0)
    return (x * torch.rsqrt(mean + eps) * wide(weight)).to(input.dtype)


def rms_norm_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, weight: Tensor, eps: float
) -> Pair:
    x, grad = wide(input), wide(grad_output)
    rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    y, scaled = x * rstd, grad * wide(weight)
    grad_input = (scaled - y * (scaled * y).mean(-1, keepdim=True)) * rstd
    return (
        grad_input.to(input.dtype) if needs[0] else None,
        (grad * y).sum_to_size(weight.shape).to(weight.dtype) if needs[1] else None,
    )


def draw_rows_and_weight(draw: Draw) -> Inputs:
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(shape[-1]), draw.choice([1e-6, 1e-3])))


def rotary(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = input.chunk(2, -1)
    return input * cos + torch.cat([-second, first], -1) * sin


def rotary_forward(input: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair by itself, as a kernel does that reads both halves of a row."""
    half = input.shape[-1] // 2
    x, y = wide(input)[..., :half], wide(input)[..., half:]
    c, s = wide(cos), wide(sin)
    turned = [x * c[..., :half] - y * s[..., :half], y * c[..., half:] + x * s[..., half:]]
    return torch.cat(turned, -1).to(input.dtype)


def draw_rotary(draw: Draw) -> Inputs:
    heads, length, half = draw.size(), draw.size(), draw.size(32)
    shapes = (heads, length, 2 * half), (length, 2 * half), (length, 2 * half)
    return Inputs(tuple(draw.tensor(*shape) for shape in shapes))


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def swiglu_forward(gate: Tensor, up: Tensor) -> Tensor:
    g = wide(gate)
    return (g / (1 + torch.exp(-g)) * wide(up)).to(gate.dtype)


def gelu_gate(gate: Tensor, up: Tensor) -> Tensor:
    return F.gelu(gate) * up


def gelu_gate_forward(gate: Tensor, up: Tensor) -> Tensor:
    g = wide(gate)
    return (0.5 * g * torch.erfc(-g * math.sqrt(0.5)) * wide(up)).to(gate.dtype)


def gelu_gate_gradient(
    needs: Sequence[bool], grad_output: Tensor, gate: Tensor, up: Tensor
) -> Pair:
    g, grad = wide(gate), wide(grad_output)
    share = 0.5 * torch.erfc(-g * math.sqrt(0.5))
    slope = share + g * torch.exp(-0.5 * g * g) * (1 / math.sqrt(2 * math.pi))
    return (
        (grad * wide(up) * slope).to(gate.dtype) if needs[0] else None,
        (grad * g * share).to(up.dtype) if needs[1] else None,
    )


def mish(input: Tensor) -> Tensor:
    return F.mish(input)


def mish_forward(input: Tensor) -> Tensor:
    x = wide(input)
    e = torch.exp(x.clamp_max(20))
    tanh = e * (e + 2) / (e * (e + 2) + 2)
    return torch.where(x > 20, x, x * tanh).to(input.dtype)


def log_softmax(input: Tensor) -> Tensor:
    return torch.log_softmax(input, -1)


def log_softmax_forward(input: Tensor) -> Tensor:
    x = wide(input)
    if not x.shape[-1]:
        return input.clone()
    shifted = x - x.amax(-1, keepdim=True)
    return (shifted - shifted.exp().sum(-1, keepdim=True).log()).to(input.dtype)


def log_softmax_gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor
) -> tuple[Tensor | None]:
    grad = wide(grad_output)
    share = torch.softmax(wide(input), -1)
    return ((grad - share * grad.sum(-1, keepdim=True)).to(input.dtype),)


def log_of_sums(input: Tensor) -> Tensor:
    return torch.logsumexp(input, -1)


def log_of_sums_forward(input: Tensor) -> Tensor:
    """Take a row in pieces of 8, and rescale the sum when a piece raises the maximum."""
    x = wide(input)
    top = x.new_full(x.shape[:-1], -math.inf)
    total = torch.zeros_like(top)
    for piece in x.split(8, -1):
        if not piece.shape[-1]:
            continue
        higher = torch.maximum(top, piece.amax(-1))
        shift = torch.where(higher.isinf(), 0, higher)
        total = total * torch.exp(top - shift) + torch.exp(piece - shift.unsqueeze(-1)).sum(-1)
        top = higher
    return (total.log() + torch.where(top.isinf(), 0, top)).to(input.dtype)


def causal_softmax(scores: Tensor) -> Tensor:
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, -math.inf), -1)


def causal_softmax_forward(scores: Tensor) -> Tensor:
    """Compute each row on its own first elements, and write zeros behind them."""
    output = torch.zeros_like(scores, memory_format=torch.contiguous_format)
    for row in range(scores.shape[-2]):
        seen = wide(scores[..., row, : row + 1])
        output[..., row, : row + 1] = torch.softmax(seen, -1).to(scores.dtype)
    return output


def draw_scores(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(), draw.choice([1, 4, 9]), draw.choice([1, 9, 17])),))


def distance_bias_softmax(scores: Tensor, slope: float = 0.5) -> Tensor:
    places = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
    return torch.softmax(scores - slope * places, -1)


def distance_bias_softmax_forward(scores: Tensor, slope: float) -> Tensor:
    x = wide(scores)
    if not x.shape[-1]:
        return scores.clone()
    x = torch.addcmul(x, torch.arange(x.shape[-1], dtype=x.dtype), x.new_tensor(-slope))
    e = (x - x.amax(-1, keepdim=True)).exp()
    return (e / e.sum(-1, keepdim=True)).to(scores.dtype)


def draw_narrow_rows(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(), draw.choice([1, 5, 33])), draw.choice([0.5, 0.125])))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    scores = query @ key.mT * (1 / math.sqrt(query.shape[-1]))
    return torch.softmax(scores, -1) @ value


def attention_forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Take keys in pieces of 4, as FlashAttention does: divide at the end."""
    q, k, v = wide(query) * (1 / math.sqrt(query.shape[-1])), wide(key), wide(value)
    top = q.new_full((*q.shape[:-1], 1), -math.inf)
    total, output = torch.zeros_like(top), torch.zeros_like(q)
    for keys, values in zip(k.split(4, -2), v.split(4, -2), strict=True):
        scores = q @ keys.mT
        higher = torch.maximum(top, scores.amax(-1, keepdim=True))
        share, e = torch.exp(top - higher), torch.exp(scores - higher)
        total = total * share + e.sum(-1, keepdim=True)
        output = output * share + e @ values
        top = higher
    return (output / total).to(query.dtype)


def draw_attention(draw: Draw) -> Inputs:
    heads, keys, width = draw.choice([1, 2, 3]), draw.choice([1, 4, 11]), draw.choice([1, 8, 5])
    queries = draw.choice([1, 6])
    shapes = (heads, queries, width), (heads, keys, width), (heads, keys, width)
    return Inputs(tuple(draw.tensor(*shape) for shape in shapes))


def row_losses(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def row_losses_forward(logits: Tensor, target: Tensor) -> Tensor:
    x = wide(logits)
    shifted = x - x.amax(-1, keepdim=True)
    chosen = shifted.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return (shifted.exp().sum(-1).log() - chosen).to(logits.dtype)


def row_losses_gradient(
    needs: Sequence[bool], grad_output: Tensor, logits: Tensor, target: Tensor
) -> Pair:
    share = torch.softmax(wide(logits), -1)
    share = share - F.one_hot(target, share.shape[-1]).to(share.dtype)
    return (share * wide(grad_output).unsqueeze(-1)).to(logits.dtype), None


def draw_targets(draw: Draw) -> Inputs:
    rows, classes = draw.size(), draw.choice([2, 7, 33])
    return Inputs((draw.tensor(rows, classes), draw.integers(rows, low=0, high=classes)))


def make_targets(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    logits = torch.randn(4, 7, generator=generator).to(device, dtype)
    return Inputs((logits, torch.randint(0, 7, (4,), generator=generator).to(device)))


def smooth_l1(input: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    return F.smooth_l1_loss(input, target, reduction="none", beta=beta)


def smooth_l1_forward(input: Tensor, target: Tensor, beta: float) -> Tensor:
    distance = (wide(input) - wide(target)).abs()
    squares = distance * distance * (0.5 / beta) if beta else distance
    return torch.where(distance < beta, squares, distance - 0.5 * beta).to(input.dtype)


def draw_beta(draw: Draw) -> Inputs:
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(*shape), draw.choice([1.0, 0.5])))


def mean_square(input: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(input, target)


def mean_square_forward(input: Tensor, target: Tensor) -> Tensor:
    difference = wide(input) - wide(target)
    return (torch.dot(difference.flatten(), difference.flatten()) / difference.numel()).to(
        input.dtype
    )


def decaying_sum(decay: Tensor, input: Tensor) -> Tensor:
    share, states = torch.sigmoid(decay), [input[..., 0]]
    for step in range(1, input.shape[-1]):
        states.append(share[..., step] * states[-1] + input[..., step])
    return torch.stack(states, -1)


def decaying_sum_forward(decay: Tensor, input: Tensor) -> Tensor:
    """Join neighbours in a tree, as a parallel scan does."""
    share, sums, step = torch.sigmoid(wide(decay)), wide(input), 1
    while step < sums.shape[-1]:
        joined = sums[..., step:] + share[..., step:] * sums[..., :-step]
        sums = torch.cat([sums[..., :step], joined], -1)
        share = torch.cat([share[..., :step], share[..., step:] * share[..., :-step]], -1)
        step *= 2
    return sums.to(input.dtype)


def draw_steps(draw: Draw) -> Inputs:
    shape = draw.size(), draw.choice([1, 6, 13])
    return Inputs((draw.tensor(*shape), draw.tensor(*shape)))


def running_maximum(input: Tensor) -> Tensor:
    return torch.cummax(input, -1).values


def running_maximum_forward(input: Tensor) -> Tensor:
    top, step = input.clone(memory_format=torch.contiguous_format), 1
    while step < top.shape[-1]:
        top[..., step:] = torch.maximum(top[..., step:], top[..., :-step].clone())
        step *= 2
    return top


def interpolated(start: Tensor, end: Tensor, weight: float = 0.25) -> Tensor:
    return torch.lerp(start, end, weight)


def interpolated_forward(start: Tensor, end: Tensor, weight: float) -> Tensor:
    one, other = wide(start), wide(end)
    return (one + (other - one) * weight).to(start.dtype)


def draw_weight(draw: Draw) -> Inputs:
    shape = draw.shape(64)
    return Inputs((draw.tensor(*shape), draw.tensor(*shape), draw.choice([0.25, 0.1, 0.45])))


def moments(input: Tensor) -> tuple[Tensor, Tensor]:
    return input.mean(-1), input.var(-1, correction=0)


def moments_forward(input: Tensor) -> tuple[Tensor, Tensor]:
    """Add one column after the other by Welford's rule."""
    x = wide(input)
    mean = torch.zeros_like(x[..., 0])
    squares = torch.zeros_like(mean)
    for count, column in enumerate(x.unbind(-1), start=1):
        step = column - mean
        mean = mean + step / count
        squares = squares + step * (column - mean)
    return mean.to(input.dtype), (squares / x.shape[-1]).to(input.dtype)


def draw_columns(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(draw.size(), draw.choice([1, 4, 19])),))


def clipped(input: Tensor, most: float = 1.0) -> Tensor:
    length = torch.linalg.vector_norm(input, dim=-1, keepdim=True)
    return input * (most / (length + 1e-6)).clamp_max(1.0)


def clipped_forward(input: Tensor, most: float) -> Tensor:
    x = wide(input)
    return (x * (most / ((x * x).sum(-1, keepdim=True).sqrt() + 1e-6)).clamp_max(1.0)).to(
        input.dtype
    )


def rounded(input: Tensor, step: float = 0.5) -> Tensor:
    return torch.round(input * step) / step


def rounded_forward(input: Tensor, step: float) -> Tensor:
    return (torch.round(wide(input) * step) / step).to(input.dtype)


def polynomial(input: Tensor) -> Tensor:
    return 0.5 + input * 0.25 - input.pow(2) * 0.125 + input.pow(3)


def polynomial_forward(input: Tensor) -> Tensor:
    x = wide(input)
    return (((x - 0.125) * x + 0.25) * x + 0.5).to(input.dtype)


def draw_float(*floats: float) -> Callable[[Draw], Inputs]:
    def draw(draw: Draw) -> Inputs:
        return Inputs((draw.tensor(*draw.shape(64)), draw.choice(list(floats))))

    return draw


TWO, ROWS = [(4, 33), (4, 33)], [(4, 33)]
OPERATORS = (
    declared(
        "rms_norm",
        rms_norm,
        rms_norm_forward,
        [(4, 33), (33,)],
        draw_rows_and_weight,
        rms_norm_gradient,
        lambda output, *args: args,
    ),
    declared("rotary", rotary, rotary_forward, [(2, 3, 8), (3, 8), (3, 8)], draw_rotary),
    declared("swiglu", swiglu, swiglu_forward, TWO, alike(2)),
    declared("gelu_gate", gelu_gate, gelu_gate_forward, TWO, alike(2), gelu_gate_gradient),
    declared("mish", mish, mish_forward, ROWS, alike(1)),
    declared(
        "log_softmax",
        log_softmax,
        log_softmax_forward,
        ROWS,
        alike(1),
        log_softmax_gradient,
    ),
    declared("log_of_sums", log_of_sums, log_of_sums_forward, ROWS, alike(1)),
    declared("causal_softmax", causal_softmax, causal_softmax_forward, [(2, 5, 7)], draw_scores),
    declared(
        "distance_bias_softmax",
        distance_bias_softmax,
        distance_bias_softmax_forward,
        ROWS,
        draw_narrow_rows,
    ),
    declared(
        "attention_by_pieces",
        attention,
        attention_forward,
        [(2, 3, 8), (2, 9, 8), (2, 9, 8)],
        draw_attention,
        autocast=lambda dtype, *args: tuple(value.to(dtype) for value in args),
    ),
    declared("smooth_l1", smooth_l1, smooth_l1_forward, TWO, draw_beta, autocast=in_float32),
    declared("mean_square", mean_square, mean_square_forward, TWO, alike(2), autocast=in_float32),
    declared("decaying_sum", decaying_sum, decaying_sum_forward, [(4, 6), (4, 6)], draw_steps),
    declared("running_maximum", running_maximum, running_maximum_forward, ROWS, alike(1)),
    declared("interpolated", interpolated, interpolated_forward, TWO, draw_weight),
    declared("moments", moments, moments_forward, [(4, 19)], draw_columns),
    declared("clipped", clipped, clipped_forward, ROWS, draw_float(1.0, 4.0)),
    declared("rounded", rounded, rounded_forward, ROWS, draw_float(0.5, 4.0)),
    declared("polynomial", polynomial, polynomial_forward, ROWS, alike(1)),
    declared(
        "row_losses",
        row_losses,
        row_losses_forward,
        [(4, 7)],
        draw_targets,
        row_losses_gradient,
        cases=(Case("4x7", make_targets, frozenset({"boundary"})),),
        autocast=in_float32,
    ),
)
