"""Operators on sequences of tensors: gradients, transforms, refusals."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from tanh_operator import make_op
from torch import Tensor

import fuselab
from fuselab.errors import (
    ArgumentError,
    DeviceError,
)
from fuselab.op import Gradient, Implementation

# Sequences of tensors.


def weighted_sum(tables: Sequence[Tensor], weights: Tensor, powers: Sequence[int]) -> Tensor:
    """The sum of weights[t] * tables[t] ** powers[t]."""
    terms = [weights[t] * table ** powers[t] for t, table in enumerate(tables)]
    return torch.stack(terms).sum(0)


def weighted_sum_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
    powers: Sequence[int],
) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [
        grad_output * weights[t] * powers[t] * table ** (powers[t] - 1) if needs[t] else None
        for t, table in enumerate(tables)
    ]
    terms = [(grad_output * table ** powers[t]).sum() for t, table in enumerate(tables)]
    return (*grads, torch.stack(terms) if needs[-1] else None)


sum_op = fuselab.operator(
    make_op(
        "dispatchtest::weighted_sum",
        reference=weighted_sum,
        implementations={"cpp": Implementation("cpu", weighted_sum, weighted_sum_gradient)},
        gradient=Gradient(save=lambda output, *args: args, reference=weighted_sum_gradient),
    )
)


def _tables(count: int = 3) -> tuple[list[Tensor], Tensor, list[int]]:
    generator = torch.Generator().manual_seed(count)
    tables = [torch.rand(4, dtype=torch.float64, generator=generator) for _ in range(count)]
    weights = torch.rand(count, dtype=torch.float64, generator=generator)
    return tables, weights, [2, 3, 1][:count]


def test_a_sequence_of_tensors_has_every_gradient() -> None:
    tables, weights, powers = _tables()
    tables[0].requires_grad_()
    tables[2].requires_grad_()
    weights.requires_grad_()
    output = sum_op(tables, weights, powers)
    torch.testing.assert_close(output, weighted_sum(tables, weights, powers))
    upstream = torch.randn_like(output)
    leaves = [tables[0], tables[2], weights]
    actual = torch.autograd.grad(output, leaves, upstream)
    expected = torch.autograd.grad(weighted_sum(tables, weights, powers), leaves, upstream)
    torch.testing.assert_close(actual, expected)


def test_a_sequence_of_tensors_differentiates_twice() -> None:
    tables, weights, powers = _tables()
    leaves = [value.requires_grad_() for value in (*tables, weights)]

    def function(*leaves: Tensor) -> Tensor:
        return sum_op(leaves[:-1], leaves[-1], powers)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_sequence_of_tensors_through_compile_vmap_and_export() -> None:
    tables, weights, powers = _tables()
    leaves = [value.clone().requires_grad_() for value in (*tables, weights)]
    compiled = torch.compile(
        lambda *leaves: sum_op(leaves[:-1], leaves[-1], powers),
        backend="aot_eager",
        fullgraph=True,
    )
    expected = torch.autograd.grad(weighted_sum(leaves[:-1], leaves[-1], powers).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), expected)
    stacked = [torch.stack([table, table + 1]) for table in tables]
    mapped = torch.func.vmap(lambda *each: sum_op(each, weights, powers))(*stacked)
    for index in range(2):
        torch.testing.assert_close(
            mapped[index], weighted_sum([table[index] for table in stacked], weights, powers)
        )

    class Module(torch.nn.Module):
        def forward(self, first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
            return sum_op([first, second], weights, [2, 1])

    args = (tables[0], tables[1], weights[:2])
    exported = torch.export.export(Module(), args).module()
    torch.testing.assert_close(exported(*args), weighted_sum(tables[:2], weights[:2], [2, 1]))


def test_what_is_no_sequence_of_tensors_is_refused() -> None:
    tables, weights, powers = _tables()
    with pytest.raises(ArgumentError, match="'tables' must be a list of Tensors, got a float in"):
        sum_op([*tables, 1.0], weights, powers)
    with pytest.raises(ArgumentError, match="'tables' must be a list of Tensors, got Tensor"):
        sum_op(tables[0], weights, powers)
    with pytest.raises(DeviceError, match="'tables' is on meta and 'tables' on cpu"):
        sum_op([tables[0], tables[1].to("meta"), tables[2]], weights, powers)
