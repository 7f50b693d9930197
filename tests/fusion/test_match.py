"""A match gives an operator tensors where it takes tensors and numbers where it takes numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from fuselab.fusion.expression import Expression, Value
from fuselab.fusion.match import Pattern, find
from fuselab.ops import contract


class Before(nn.Module):
    def forward(self, input: Tensor, update: Tensor) -> Tensor:
        return torch.relu(input + 0.5 * update)


class Behind(nn.Module):
    def forward(self, input: Tensor, update: Tensor) -> Tensor:
        return torch.relu(input + update * 0.5)


@pytest.mark.parametrize("model", [Before(), Behind()])
def test_a_scale_is_never_bound_to_a_tensor(model: nn.Module) -> None:
    op = contract("add_mul_activation")
    traced = fx.symbolic_trace(model)
    expression = Expression(traced.graph, traced, keep=set())
    matches = find(expression, [Pattern(op, rewrite) for rewrite in op.rewrites])
    whole = [match for match in matches if len(match.covered) == 3]
    assert whole
    for match in whole:
        input, update, bias, scale, activation = op.bind(match.rewrite.call(**match.bindings))
        assert isinstance(input, Value)
        assert isinstance(update, Value)
        assert (bias, scale, activation) == (None, 0.5, "relu")
