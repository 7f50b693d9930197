"""Linear layers with an activation behind each, all in one kernel where no gradient is needed."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.mlp import layers
from fuselab.ops.mlp.op import OP, check_layers
from fuselab.runtime.dispatch import operator

_operator = operator(OP)


@functools.wraps(_operator)
def mlp(
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor] = (),
    *rest: Any,
    implementation: str = "auto",
    **named: Any,
) -> Tensor:
    # The operator keeps no hidden activation and would compute all again for a gradient.
    if implementation == "auto" and torch.is_grad_enabled() and _wanted(input, weights, biases):
        args = OP.signature.bind(input, weights, biases, *rest, **named)
        args.apply_defaults()
        check_layers(*args.args)
        return layers.forward(*args.args)
    return _operator(input, weights, biases, *rest, implementation=implementation, **named)


def _wanted(input: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> bool:
    return any(getattr(value, "requires_grad", False) for value in (input, *weights, *biases))


__all__ = ["OP", "mlp"]
