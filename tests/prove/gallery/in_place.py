"""An honest operator that writes over an argument: input = silu(input * scale + bias), in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Inputs
from gallery import honest


def reference(input: Tensor, bias: Tensor, scale: float = 1.0) -> Tensor:
    return honest.reference(input, bias, scale).to(input.dtype)


def forward(input: Tensor, bias: Tensor, scale: float) -> None:
    input.copy_(honest.computed(input, bias, scale))


def draw(draw: Draw) -> Inputs:
    columns = draw.size(64)
    lead = [draw.size() for _ in range(draw.choice([1, 0, 2]))]
    return Inputs((draw.tensor(*lead, columns), draw.tensor(columns), draw.choice([1.0, -2.0])))


def make_op(
    name: str, device: str = "cpu", forward: Callable[..., Any] = forward, **changes: Any
) -> FusedOp:
    """The honest operator, or one with a part of it replaced, under ``gallery::name_``."""
    fields: dict[str, Any] = {
        "reference": reference,
        "draw": draw,
        "mutates": ("input",),
    }
    return honest.make_op(f"{name}_", device, forward, None, None, **(fields | changes))


def scaled(tables: Sequence[Tensor], scale: float) -> tuple[Tensor, ...]:
    return tuple(table * scale for table in tables)


def scale_all(tables: Sequence[Tensor], scale: float) -> None:
    for table in tables:
        table.mul_(scale)


def make_tables(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return Inputs(([torch.randn(3, 5, generator=generator).to(device, dtype)], 0.5))


def draw_tables(draw: Draw) -> Inputs:
    tables = [draw.tensor(draw.size(), draw.choice([1, 3])) for _ in range(draw.choice([1, 2]))]
    return Inputs((tables, draw.choice([0.5, -2.0])))


def make_sequence_op(
    name: str, device: str = "cpu", forward: Callable[..., Any] = scale_all
) -> FusedOp:
    """An honest operator that writes over every tensor of a sequence: each times ``scale``."""
    return make_op(
        name,
        device,
        forward,
        reference=scaled,
        draw=draw_tables,
        mutates=("tables",),
        cost=lambda tables, scale: Cost(1, 1, 1),
        cases=(Case("3x5", make_tables, frozenset({"boundary"})),),
    )
