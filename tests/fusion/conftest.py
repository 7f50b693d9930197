"""A small operator with rewrites: fuse is tested by what a contract says, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs, Rewrite

ACTIVATIONS = {"relu": torch.relu, "tanh": torch.tanh, "gelu": F.gelu}


def reference(input: Tensor, bias: Tensor, activation: str = "relu") -> Tensor:
    return ACTIVATIONS[activation](input + bias)


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, bias: Tensor, activation: str
) -> tuple[Tensor | None, ...]:
    sum_ = input + bias
    if activation == "relu":
        grad = grad_output * (sum_ > 0)
    elif activation == "tanh":
        grad = grad_output * (1 - torch.tanh(sum_) ** 2)
    else:
        density = torch.exp(-sum_ * sum_ / 2) / math.sqrt(2 * math.pi)
        grad = grad_output * (0.5 * (1 + torch.erf(sum_ / math.sqrt(2))) + sum_ * density)
    rows = grad.reshape(-1, grad.shape[-1])
    return (grad if needs[0] else None, rows.sum(0) if needs[1] else None)


def validate(input: Tensor, bias: Tensor, activation: str) -> None:
    if bias.shape != input.shape[-1:]:
        raise ShapeError(f"bias must have shape {list(input.shape[-1:])}, got {list(bias.shape)}.")


def rewrite(activation: str) -> Rewrite:
    return Rewrite(
        pattern=lambda input, bias: ACTIVATIONS[activation](input + bias),
        call=lambda input, bias: Inputs((input, bias, activation)),
    )


def make_op(name: str, **changes: object) -> FusedOp:
    """The operator, right and in plain PyTorch, under ``name``."""
    fields: dict[str, object] = {
        "reference": reference,
        "implementations": {"cpp": Implementation("cpu", reference, gradient)},
        "cost": lambda input, bias, activation: Cost(input.nbytes + bias.nbytes, input.nbytes, 0),
        "cases": [
            Case("4x4", lambda device, dtype, generator: Inputs((torch.ones(4, 4), torch.ones(4))))
        ],
        "gradient": Gradient(
            save=lambda output, input, bias, activation: (input, bias, activation),
            reference=gradient,
        ),
        "validate": validate,
        "rewrites": [rewrite(activation) for activation in ACTIVATIONS],
    }
    return FusedOp(name=name, **{**fields, **changes})  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def op() -> FusedOp:
    return make_op("fusiontest::bias_act")
