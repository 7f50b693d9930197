"""Patterns of values that tensors have in use and that no random numbers show: sorted, whole, all
alike, one-hot, of one sign.

A candidate may take a shortcut for one of them, or go wrong on it alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Pattern = Callable[[Tensor, torch.dtype], Tensor]


def _rows_alike(normal: Tensor, dtype: torch.dtype) -> Tensor:
    flat = normal.reshape(-1, normal.shape[-1]) if normal.ndim else normal.reshape(1, 1)
    return flat[:1].expand(flat.shape).reshape(normal.shape)


def _one_hot(normal: Tensor, dtype: torch.dtype) -> Tensor:
    if not normal.ndim:
        return torch.ones_like(normal)
    return (normal == normal.amax(-1, keepdim=True)).double()


def _opposite(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return pairs of neighbours of opposite sign, whose sum is 0."""
    pairs = normal.clone()
    if normal.ndim:
        count = normal.shape[-1] // 2 * 2
        pairs[..., 1:count:2] = -pairs[..., 0:count:2]
    return pairs


def _alternating(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of which each has another sign than its neighbours in the row."""
    return torch.where(_is_odd(normal, 1), -normal.abs(), normal.abs())


def _checkerboard(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of which every other one is 0, in each row other ones than in the one before
    it."""
    return torch.where(_is_odd(normal, 2), 0.0, normal)


def _zero_rows(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers of which every other row is 0, as a batch's padding is; of a single row, every
    other number."""
    if normal.ndim < 2:
        return torch.where(_is_odd(normal, 1), 0.0, normal)
    return torch.where(_is_odd(normal[..., 0], 1).unsqueeze(-1), 0.0, normal)


def _is_odd(tensor: Tensor, dims: int) -> Tensor:
    """Return whether the positions along the last ``dims`` dimensions add up to an odd number."""
    total = torch.zeros((), dtype=torch.int64)
    for size in tensor.shape[max(0, tensor.ndim - dims) :]:
        total = total.unsqueeze(-1) + torch.arange(size)
    return (total % 2 == 1).expand(tensor.shape)


def _far_from_zero(normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return numbers near a large one, whose differences the dtype just holds."""
    return (64.0 if dtype.itemsize == 2 else 8192.0) + normal


def _all(number: float) -> Pattern:
    return lambda normal, dtype: torch.full_like(normal, number)


PATTERNS: dict[str, Pattern] = {
    "ones": _all(1.0),
    "one number": lambda normal, dtype: normal.reshape(-1)[0].expand(normal.shape),
    "all -0.0": _all(-0.0),
    "all NaN": _all(math.nan),
    "all infinity": _all(math.inf),
    "all -infinity": _all(-math.inf),
    "ascending": lambda normal, dtype: normal.sort(-1).values,
    "descending": lambda normal, dtype: normal.sort(-1, descending=True).values,
    "whole numbers": lambda normal, dtype: (normal * 4).round(),
    "zeros and ones": lambda normal, dtype: (normal > 0).double(),
    "mostly zeros": lambda normal, dtype: torch.where(normal.abs() < 1.5, 0.0, normal),
    "one-hot": _one_hot,
    "equal rows": _rows_alike,
    "opposite pairs": _opposite,
    "alternating signs": _alternating,
    "checkerboard of zeros": _checkerboard,
    "zero rows": _zero_rows,
    "positive": lambda normal, dtype: normal.abs(),
    "negative": lambda normal, dtype: -normal.abs(),
    "far from zero": _far_from_zero,
    # As torch.rand gives them, initial weights, logits, images and measurements.
    "uniform": lambda normal, dtype: torch.special.ndtr(normal),
    "small": lambda normal, dtype: normal / 64,
    "tens": lambda normal, dtype: normal * 32,
    "bytes": lambda normal, dtype: (torch.special.ndtr(normal) * 256).floor().clamp(max=255.0),
    "heavy tails": lambda normal, dtype: normal * (normal.square() / 4).exp(),
}
# Patterns that an upstream gradient may have, whose infinities are another check's subject.
FINITE_PATTERNS = tuple(
    name for name in PATTERNS if not name.endswith("infinity") and name != "all NaN"
)


def patterned(name: str, normal: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a contiguous tensor with a pattern made from ``normal``, which is float64, rounded to
    ``dtype``."""
    if not normal.numel():
        return normal.to(dtype)
    return PATTERNS[name](normal, dtype).to(dtype).contiguous()
