"""Gradients that are the upstream one itself: returned as they are, and asked of nobody."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.prove.asked_outputs import undeclared
from fuselab.prove.held import Held

ASKED: list[tuple[bool, ...]] = []


def reference(input: Tensor, row: Tensor) -> Tensor:
    return input + row * row


def gradient(needs: Sequence[bool], grad_output: Tensor, row: Tensor) -> tuple[Tensor | None, ...]:
    of_row = (2 * row * grad_output).sum_to_size(row.shape) if needs[1] else None
    return grad_output if needs[0] else None, of_row


def backward(needs: Sequence[bool], *args: Tensor) -> tuple[Tensor | None, ...]:
    ASKED.append(tuple(needs))
    found = gradient(needs, *args)
    return found[0].clone() if found[0] is not None else None, found[1]


OP = FusedOp(
    name="unchangedtest::add_square",
    reference=reference,
    implementations={"cpp": Implementation("cpu", reference, backward)},
    cost=lambda *args: Cost(1, 1, 1),
    cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 2))],
    gradient=Gradient(
        lambda output, input, row: (row,),
        gradient,
        unchanged=lambda grad_output, row: (True, False),
    ),
)
op = fuselab.operator(OP)


@pytest.fixture
def tensors() -> tuple[Tensor, Tensor, Tensor]:
    ASKED.clear()
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).double() for shape in ((5, 4), (4,), (5, 4))]
    return made[0].requires_grad_(), made[1].requires_grad_(), made[2]


@pytest.mark.parametrize("implementation", ["auto", "cpp", "reference"])
def test_the_upstream_gradient_is_not_copied(tensors, implementation):
    input, row, upstream = tensors
    for _ in range(3):
        output = op(input, row, implementation=implementation)
        ours = torch.autograd.grad(output, (input, row), upstream)
        assert ours[0].data_ptr() == upstream.data_ptr() and torch.equal(ours[0], upstream)
        torch.testing.assert_close(ours[1], (2 * row * upstream).sum(0))
    assert set(ASKED) == (set() if implementation == "reference" else {(False, True)})


def test_nobody_is_asked_for_it_alone(tensors):
    input, row, upstream = tensors
    (ours,) = torch.autograd.grad(op(input, row.detach()), input, upstream)
    assert ours.data_ptr() == upstream.data_ptr() and ASKED == []


def test_the_raw_operator_returns_memory_of_its_own(tensors):
    _, row, upstream = tensors
    raw = torch.ops.unchangedtest.add_square_backward
    ours = raw([True, True], upstream, row.detach(), "auto")
    assert ours[0].data_ptr() != upstream.data_ptr() and torch.equal(ours[0], upstream)
    assert ASKED == [(True, True)]


def test_derivatives_compiled_and_twice(tensors):
    input, row, upstream = tensors
    compiled = torch.compile(lambda *args: op(*args).sin(), backend="aot_eager", fullgraph=True)
    for function in (compiled, lambda *args: op(*args).sin()):
        ours = torch.autograd.grad(function(input, row), (input, row), upstream)
        theirs = torch.autograd.grad(reference(input, row).sin(), (input, row), upstream)
        torch.testing.assert_close(ours, theirs)
    assert torch.autograd.gradcheck(op, (input, row))
    assert torch.autograd.gradgradcheck(op, (input, row))


@pytest.mark.parametrize("strides", [(4, 1), (1, 1), (0, 1), (0, 0)])
def test_the_judge_takes_it_in_the_strides_that_the_caller_gave_it(tensors, strides):
    """The caller's gradient may have elements that share memory, as an expanded one has; eager's
    addition returns it as it is, too."""
    input, row, upstream = tensors
    args = [input.detach(), row.detach()]
    given = torch.as_strided(upstream, input.shape, strides)
    assert undeclared(Held(OP, "cpp"), args, [given]) is None
