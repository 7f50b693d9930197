"""Gradients that are the upstream one itself: returned as they are, and asked of nobody."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.prove.asked_outputs import undeclared
from fuselab.prove.held import Held
from fuselab.runtime import autograd_node

ASKED: list[tuple[bool, ...]] = []


def reference(input: Tensor, row: Tensor) -> Tensor:
    return input + row * row


def gradient(needs: Sequence[bool], grad_output: Tensor, row: Tensor) -> tuple[Tensor | None, ...]:
    of_row = (2 * row * grad_output).sum_to_size(row.shape) if needs[1] else None
    return grad_output if needs[0] else None, of_row


def backward(needs: Sequence[bool], *args: Any) -> tuple[Tensor | None, ...]:
    ASKED.append(tuple(needs))
    found = gradient(needs, *args)
    return found[0].clone() if found[0] is not None else None, found[1]


OP = FusedOp(
    name="passedtest::add_square",
    reference=reference,
    implementations={"cpp": Implementation("cpu", reference, backward)},
    cost=lambda *args: Cost(1, 1, 1),
    cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 2))],
    gradient=Gradient(
        lambda output, input, row: (row,),
        gradient,
        passed=((0, 0),),
    ),
)
op = fuselab.operator(OP)


def signs_and_sum(input: Tensor, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return input.sign().long(), input * 2, input + row


def gradient_of_both(
    needs: Sequence[bool], grad_output: Sequence[Tensor], input: Tensor, row: Tensor
) -> tuple[Tensor | None, ...]:
    _, doubled, summed = grad_output
    of_input = (doubled * 2 + summed).to(input.dtype) if needs[0] else None
    return of_input, summed.sum_to_size(row.shape).to(row.dtype) if needs[1] else None


def backward_of_both(needs: Sequence[bool], *args: Any) -> tuple[Tensor | None, ...]:
    ASKED.append(tuple(needs))
    found = gradient_of_both(needs, *args)
    return tuple(one if one is None else one.clone() for one in found)


SEVERAL = FusedOp(
    name="passedtest::signs_and_sum",
    reference=signs_and_sum,
    implementations={"cpp": Implementation("cpu", signs_and_sum, backward_of_both)},
    cost=lambda *args: Cost(1, 1, 1),
    cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 2))],
    gradient=Gradient(lambda output, *args: args, gradient_of_both, passed=((1, 2),)),
)
several = fuselab.operator(SEVERAL)


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
    raw = torch.ops.passedtest.add_square_backward
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


@pytest.mark.parametrize("is_planned", [False, True])
def test_of_one_of_several_outputs(tensors, is_planned):
    """In the first call of a kind and, from a plan, in autograd's own node. The first output has no
    gradient; where the row has another shape or dtype, an implementation is asked."""
    if is_planned and not autograd_node.start():
        pytest.skip("autograd's node cannot be built here")
    input, row, upstream = tensors
    same = torch.randn_like(upstream, requires_grad=True)
    single = torch.randn(upstream.shape, requires_grad=True)
    for other, is_passed in ((same, True), (row, False), (single, False)):
        for turn in range(3):
            ASKED.clear()
            _, doubled, summed = several(input, other, implementation="cpp")
            ours = torch.autograd.grad((doubled, summed), (input, other), (upstream * 3, upstream))
            assert (ours[1].data_ptr() == upstream.data_ptr()) == is_passed
            torch.testing.assert_close(ours[0], 7 * upstream)
            expected = upstream.sum_to_size(other.shape).to(other.dtype)
            torch.testing.assert_close(ours[1], expected)
            if not turn:
                assert [(True, not is_passed)] == ASKED
    assert torch.autograd.gradgradcheck(lambda *args: several(*args)[1:], (input, same))


def test_an_output_without_a_loss_passes_zeros(tensors):
    input, _, upstream = tensors
    other = torch.randn_like(upstream, requires_grad=True)
    for _ in range(3):
        _, doubled, _ = several(input, other, implementation="cpp")
        ours = torch.autograd.grad(doubled, (input, other), upstream, allow_unused=True)
        torch.testing.assert_close(ours[0], 2 * upstream)
        assert ours[1] is None or not ours[1].any()
