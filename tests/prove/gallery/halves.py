"""An honest operator that halves a dimension: torch.compile makes a graph of its own for the
sizes whose half is 1, of the reference as of the operator."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Inputs
from gallery import honest


def reference(input: Tensor) -> Tensor:
    return torch.nn.functional.glu(input, 0).flatten()


def forward(input: Tensor) -> Tensor:
    value, gate = honest.wide(input).chunk(2, 0)
    return (value * torch.sigmoid(gate)).to(input.dtype).flatten()


def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    return Inputs((torch.randn(4, 8, generator=generator).to(device, dtype),))


def draw(draw: Draw) -> Inputs:
    return Inputs((draw.tensor(2 * draw.size(), draw.size()),))


def make_op(name: str, device: str = "cpu", **changes: Any) -> FusedOp:
    """Return the operator under ``gallery::name``, with other parts where ``changes`` has them."""
    return honest.make_op(
        name,
        device,
        forward,
        None,
        None,
        reference=reference,
        cost=lambda input: Cost(input.nbytes, input.nbytes // 2, 4 * input.numel()),
        cases=(Case("4x8", make, frozenset({"boundary"})),),
        draw=draw,
        **changes,
    )
