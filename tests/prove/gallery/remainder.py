"""An honest operator of integers alone: ids modulo a cardinality, never negative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Inputs
from gallery import honest


def reference(ids: Tensor, cardinality: int) -> Tensor:
    return torch.remainder(ids, cardinality)


def forward(ids: Tensor, cardinality: int) -> Tensor:
    quotient = ids.div(cardinality, rounding_mode="floor")
    return torch.empty_like(ids).copy_(ids - quotient * cardinality)


def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    ids = torch.randint(1000, (4, 8), generator=generator)
    return Inputs((ids.to(device, dtype), 7))


def draw(draw: Draw) -> Inputs:
    reach = draw.choice([1000, 2**31])
    ids = draw.integers(draw.size(), draw.size(), low=-reach, high=reach, dtype=draw.dtype)
    return Inputs((ids, draw.choice([1000, 7, 10, 1])))


def make_op(name: str, device: str = "cpu", forward: Callable[..., Any] = forward) -> FusedOp:
    """The honest operator, or one with its kernel replaced, under ``gallery::name``."""
    return honest.make_op(
        name,
        device,
        forward,
        None,
        None,
        reference=reference,
        cost=lambda ids, cardinality: Cost(8 * ids.numel(), 8 * ids.numel(), ids.numel()),
        cases=(Case("4x8", make, frozenset({"boundary"})),),
        draw=draw,
        dtypes=(torch.int64, torch.int32),
    )
