"""The functions that the tests eject, each with an example of its arguments."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LIMIT = 2.5


def biased_mish(x, bias):
    return F.mish(x + bias)


def residual_norm(x, residual, weight, bias):
    hidden = x + residual
    normed = F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5)
    return F.gelu(normed) * 2


def dropped_residual(x, residual, weight, bias):
    hidden = F.dropout(x, 0.1) + residual
    return F.layer_norm(hidden, hidden.shape[-1:], weight, bias)


def rms_norm(x, weight):
    scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
    return x * scale * weight


def channels_first_norm(x, weight):
    mean = x.mean(1, keepdim=True)
    deviation = x - mean
    variance = deviation.square().mean(1, keepdim=True)
    return deviation * torch.rsqrt(variance + 1e-6) * weight[:, None, None]


def group_norm_silu(x, weight, bias):
    return F.silu(F.group_norm(x, 4, weight, bias))


def instance_norm_relu(x):
    return F.relu(F.instance_norm(x))


def masked_softmax(x, mask):
    scores = x / 8 + mask
    return torch.softmax(scores, -1)


def scaled_log_softmax(logits, bias):
    return F.log_softmax((logits + bias) * 0.5, dim=-1)


def _leaky(y, slope):
    return torch.where(y > 0, y, y * slope)


def clamped(x, bias):
    y = torch.clamp(x + bias, -LIMIT, LIMIT)
    return _leaky(y, 0.1)


def smooth_loss(prediction, target):
    return F.huber_loss(prediction, target)


def sum_of_squares(x):
    return (x * x).sum()


def symmetric(x):
    return (x + x.t()).tanh()


def mean_of_two(x):
    return torch.exp(x.mean((0, 2)))


def largest(x):
    return x.amax(0)


def unit_columns(x):
    return F.normalize(x, dim=1)


def activations(x, y):
    return F.softplus(x) * F.elu(y) + F.hardswish(x)


def soft_maximum(x):
    return torch.logsumexp(x, -1)


def in_place(x, bias):
    y = x + bias
    y.mul_(2).add_(1)
    return y.relu_()


def add_rms_norm(x, residual, weight):
    hidden = x + residual
    scale = torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-6)
    normed = hidden * scale * weight
    return hidden, normed


def row_statistics(x, weight):
    mean = x.mean(-1, keepdim=True)
    centred = (x - mean) * weight
    return {
        "centred": centred,
        "mean": mean.detach(),
        "is_positive": centred > 0,
        "count": (x > 0).sum(-1),
    }


def two_losses(prediction, target):
    square = (prediction - target).square()
    return square.mean(), square.sum(-1)


Pair = namedtuple("Pair", ["hidden", "activated"])


def named_pair(x, residual):
    hidden = x + residual
    return Pair(hidden, torch.tanh(hidden))


def nested(x, y, mask=None, factor=2.0):
    hidden = (x + y) * factor
    sizes = {"rows": x.shape[0], "all": hidden.numel(), "mask": mask}
    return [hidden, (None, x, hidden.t()), sizes, hidden, "text", y.view(-1)]


def halves(x):
    doubled = x * 2
    return doubled.chunk(2, -1)


def other_dtypes(x):
    whole = x.floor()
    return whole.to(torch.int64), whole.int(), x - whole, x.double(), torch.zeros_like(x)


def copies(x, y):
    return x.clone(), x + y, (x + y).clone()


def one_in_a_tuple(x):
    return (torch.relu(x),)


def comparisons(x, y):
    return x > y, x.ge(y)


def by_keyword(x, *, bias=None, exponent=2.0, scale):
    y = x**exponent * scale
    return (y, None) if bias is None else (y, y + bias)


def reassigned(x, weight):
    x = x * weight
    weight = x + 1
    return x, weight


class GatedNorm(nn.Module):
    """A module with parameters of its own and of a child."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.full((1,), 2.0))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        hidden = self.norm(x) + residual
        gate = torch.sigmoid(hidden) * self.scale
        return gate * hidden


def _normal(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(torch.ones(shape) for shape in shapes)


# Each function and an example of its arguments; only shapes and dtypes matter.
EXAMPLES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...]]] = {
    "biased_mish": (biased_mish, _normal((4, 8, 16), (16,))),
    "residual_norm": (residual_norm, _normal((4, 8, 16), (4, 8, 16), (16,), (16,))),
    "rms_norm": (rms_norm, _normal((3, 5, 32), (32,))),
    "channels_first_norm": (channels_first_norm, _normal((2, 8, 5, 6), (8,))),
    "group_norm_silu": (group_norm_silu, _normal((2, 8, 5, 6), (8,), (8,))),
    "instance_norm_relu": (instance_norm_relu, _normal((2, 3, 4, 5))),
    "masked_softmax": (masked_softmax, _normal((2, 4, 6, 12), (6, 12))),
    "scaled_log_softmax": (scaled_log_softmax, _normal((6, 20), (20,))),
    "clamped": (clamped, _normal((2, 3, 4, 5), (3, 1, 1))),
    "smooth_loss": (smooth_loss, _normal((5, 6), (5, 6))),
    "sum_of_squares": (sum_of_squares, _normal((6, 9))),
    "symmetric": (symmetric, _normal((6, 6))),
    "mean_of_two": (mean_of_two, _normal((3, 4, 5))),
    "largest": (largest, _normal((7, 5))),
    "unit_columns": (unit_columns, _normal((3, 8, 5))),
    "activations": (activations, _normal((5, 6), (5, 6))),
    "soft_maximum": (soft_maximum, _normal((5, 6))),
    "in_place": (in_place, _normal((5, 6), (6,))),
    "add_rms_norm": (add_rms_norm, _normal((3, 5, 32), (3, 5, 32), (32,))),
    "row_statistics": (row_statistics, _normal((6, 9), (9,))),
    "two_losses": (two_losses, _normal((6, 9), (6, 9))),
    "gated_norm": (GatedNorm(), _normal((4, 8, 16), (4, 8, 16))),
}

# A function whose operator takes a seed after the arguments.
DROPPED: tuple[Callable[..., Any], tuple[Tensor, ...]] = (
    dropped_residual,
    _normal((4, 8, 16), (4, 8, 16), (16,), (16,)),
)

# Functions that return more than the operator does: each with its arguments and those by keyword.
STRUCTURES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Any]]] = {
    **{name: (*EXAMPLES[name], {}) for name in ("add_rms_norm", "row_statistics", "two_losses")},
    "named_pair": (named_pair, _normal((4, 8), (4, 8)), {}),
    "nested": (nested, _normal((4, 8), (4, 8)), {}),
    "halves": (halves, _normal((4, 8)), {}),
    "other_dtypes": (other_dtypes, _normal((4, 8)), {}),
    "copies": (copies, _normal((4, 8), (4, 8)), {}),
    "one_in_a_tuple": (one_in_a_tuple, _normal((4, 8)), {}),
    "comparisons": (comparisons, _normal((4, 8), (4, 8)), {}),
    "by_keyword": (by_keyword, _normal((4, 8)), {"scale": torch.ones(8), "exponent": 3.0}),
    "reassigned": (reassigned, _normal((4, 8), (8,)), {}),
}
