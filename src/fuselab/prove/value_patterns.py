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
