"""Operators that write over their arguments: versions, autograd, compile, refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import pytest
import torch
from tanh_operator import CALLS, make_op
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import fuselab
from fuselab.errors import (
    ArgumentError,
    ContractError,
    DifferentiationError,
    UnsupportedError,
)
from fuselab.op import Implementation

# Operators that write over their arguments.


def shifted(values: Sequence[Tensor], state: Tensor, step: float) -> tuple[Tensor, ...]:
    """(values + step..., state + 1)."""
    return (*(value + step for value in values), state + 1)


def write_shifted(values: Sequence[Tensor], state: Tensor, step: float) -> None:
    CALLS.append("write")
    for value in values:
        value.data.add_(float(step))  # as a kernel does: unseen by autograd
    state.data.add_(1)


shift_op_ = fuselab.operator(
    make_op(
        "dispatchtest::shift_",
        reference=shifted,
        implementations={"cpp": Implementation("cpu", write_shifted)},
        gradient=None,
        mutates=("values", "state"),
    )
)


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_arguments_are_written_over_and_their_versions_move(implementation: str) -> None:
    values, state = [torch.zeros(3), torch.ones(2, 2)], torch.zeros(1)
    before = [value._version for value in (*values, state)]
    returned = shift_op_(values, state, 0.5, implementation=implementation)
    assert returned is values
    assert [value.tolist() for value in values] == [[0.5] * 3, [[1.5] * 2] * 2]
    assert state.tolist() == [1.0]
    after = [value._version for value in (*values, state)]
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_autograd_sees_that_a_saved_tensor_was_written_over() -> None:
    weight = torch.ones(3, requires_grad=True)
    value = torch.ones(3)
    product = (weight * value).sum()
    shift_op_([value], torch.zeros(1), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_writing_over_inside_compile_and_inference_mode() -> None:
    def function(value: Tensor) -> Tensor:
        doubled = value * 2
        shift_op_([doubled], torch.zeros(1), 1.0)
        return doubled * 3

    assert torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [
        9.0,
        9.0,
    ]
    with torch.inference_mode():
        assert function(torch.ones(2)).tolist() == [9.0, 9.0]


def test_writing_over_what_must_not_be_written_over_is_refused() -> None:
    state = torch.zeros(1)
    with pytest.raises(DifferentiationError, match="shift_ defines no gradient"):
        shift_op_([torch.ones(3, requires_grad=True)], state, 1.0)
    with pytest.raises(ArgumentError, match="elements share memory"):
        shift_op_([torch.ones(1).expand(3)], state, 1.0)
    both = torch.ones(6)
    with pytest.raises(ArgumentError, match="another of its arguments"):
        shift_op_([both[:4], both[3:]], state, 1.0)
    shift_op_([both[:3], both[3:]], state, 1.0)
    assert both.tolist() == [2.0] * 6
    with pytest.raises(UnsupportedError, match="vmap cannot follow"):
        torch.func.vmap(lambda value: shift_op_([value], state, 1.0)[0])(torch.ones(2, 3))


def test_meta_and_fake_tensors_lie_nowhere_and_so_overlap_nothing() -> None:
    for mode, device in ((contextlib.nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode:
            values, state = torch.zeros(3, device=device), torch.zeros(1, device=device)
            assert shift_op_([values], state, 1.0)[0] is values


def test_what_no_kernel_can_write_over_is_refused() -> None:
    state = torch.zeros(1)
    with pytest.raises(ArgumentError, match=r"'values' has layout torch\.sparse_coo"):
        shift_op_([torch.ones(2, 2).to_sparse()], state, 1.0)
    with pytest.raises(ArgumentError, match="resolve_neg"):
        shift_op_([torch._neg_view(torch.ones(3))], state, 1.0)


def test_a_name_with_an_underscore_and_mutates_go_together() -> None:
    with pytest.raises(ContractError, match="ends in '_' if and only if"):
        make_op("dispatchtest::shift", mutates=("values",), gradient=None)
    with pytest.raises(ContractError, match="has no gradient"):
        make_op("dispatchtest::shift_", mutates=("input",))
