"""An operator of plain PyTorch for tests of dispatch, which notes every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import fuselab
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs


def reference(
    input: Tensor, update: Tensor, bias: Tensor | None = None, scale: float = 1.0, power: int = 1
) -> Tensor:
    """tanh(input + scale * update + bias) ** power."""
    total = input + scale * update
    if bias is not None:
        total = total + bias
    return torch.tanh(total) ** power


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    update: Tensor,
    bias: Tensor | None,
    scale: float,
    power: int,
) -> tuple[Tensor | None, ...]:
    value = torch.tanh(input + scale * update + (0 if bias is None else bias))
    grad = grad_output * power * value ** (power - 1) * (1 - value * value)
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad if needs[0] else None,
        grad * scale if needs[1] else None,
        rows.sum(0) if needs[2] else None,
    )


CALLS: list[str] = []


def forward(*args: Any) -> Tensor:
    CALLS.append("forward")
    return reference(*args)


def backward(*args: Any) -> tuple[Tensor | None, ...]:
    CALLS.append("backward")
    return gradient(*args)


def make_op(name: str, **changes: Any) -> FusedOp:
    fields: dict[str, Any] = {
        "reference": reference,
        "implementations": {"cpp": Implementation("cpu", forward, backward)},
        "cost": lambda *args: Cost(1, 1, 1),
        "cases": [Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 2))],
        "gradient": Gradient(save=lambda output, *args: args, reference=gradient),
    }
    return FusedOp(name=name, **{**fields, **changes})


tanh_op = fuselab.operator(make_op("dispatchtest::tanh_op"))


def inputs(*, grad: bool, dtype: torch.dtype = torch.float64, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 4), (rows, 4), (4,))
    return [
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(grad)
        for shape in shapes
    ]
