"""An honest operator that writes over an argument: input = silu(input * scale + bias), in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fuselab.op import Draw, FusedOp, Inputs
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
