"""Gradients that are one tensor, as those of the terms of a sum: asked for and computed once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.errors import ContractError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs

ASKED: list[tuple[bool, ...]] = []


def reference(input: Tensor, scale: Tensor, other: Tensor) -> Tensor:
    return (input + other) * scale


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: Tensor, other: Tensor
) -> tuple[Tensor | None, ...]:
    return (
        (grad_output * scale).to(input.dtype) if needs[0] else None,
        grad_output * (input + other) if needs[1] else None,
        (grad_output * scale).to(other.dtype) if needs[2] else None,
    )


def backward(needs: Sequence[bool], *args: Tensor) -> tuple[Tensor | None, ...]:
    ASKED.append(tuple(needs))
    return gradient(needs, *args)


def declared(name: str, equal: Sequence[tuple[int, int]]) -> FusedOp:
    return FusedOp(
        name=f"equaltest::{name}",
        reference=reference,
        implementations={"cpp": Implementation("cpu", reference, backward)},
        cost=lambda *args: Cost(1, 1, 1),
        cases=[Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 3))],
        gradient=Gradient(lambda output, *args: args, gradient, equal=equal),
    )


op = fuselab.operator(declared("scaled_sum", ((2, 0),)))


def drawn(*dtypes: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(5, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for dtype in dtypes or (torch.float64,) * 3
    ]


def test_one_is_asked_for_and_both_get_it() -> None:
    args = drawn()
    ASKED.clear()
    output = op(*args)
    ours = torch.autograd.grad(output, args, output)
    assert ours[0].data_ptr() == ours[2].data_ptr() and ASKED == [(True, True, False)]
    torch.testing.assert_close(ours, torch.autograd.grad(reference(*args), args, output))


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 1), (0, 2), (1, 2)])
def test_what_is_wanted_of_them(wanted: tuple[int, ...]) -> None:
    args = drawn()
    output = op(*args)
    asked = [args[place] for place in wanted]
    theirs = torch.autograd.grad(reference(*args), asked, output.detach())
    torch.testing.assert_close(torch.autograd.grad(output, asked, output.detach()), theirs)


def test_other_dtypes_and_strides_have_gradients_of_their_own() -> None:
    args = drawn(torch.float64, torch.float64, torch.float32)
    output = op(*args)
    ours = torch.autograd.grad(output, args, output)
    assert [one.dtype for one in ours] == [one.dtype for one in args]
    torch.testing.assert_close(ours, torch.autograd.grad(reference(*args), args, output))
    args = drawn()
    args[2] = args[2].detach().t().contiguous().t().requires_grad_()
    output = op(*args)
    ours = torch.autograd.grad(output, args, output)
    assert ours[0].data_ptr() != ours[2].data_ptr()


def test_leaves_keep_gradients_of_their_own() -> None:
    """Change one leaf's gradient in place: that of the other stays, as with PyTorch's own sum."""
    args = drawn()
    for _ in range(2):
        op(*args).sum().backward()
    args[0].grad.zero_()
    torch.testing.assert_close(args[2].grad, 2 * args[1].detach())


def test_one_tensor_twice_and_derivatives() -> None:
    input, scale, other = drawn()
    (ours,) = torch.autograd.grad(op(input, scale, input).sum(), input)
    torch.testing.assert_close(ours, 2 * scale)
    assert torch.autograd.gradcheck(op, (input, scale, other))
    assert torch.autograd.gradgradcheck(op, (input, scale, other))
    compiled = torch.compile(lambda *args: op(*args).sin(), backend="aot_eager", fullgraph=True)
    ours = torch.autograd.grad(compiled(input, scale, other).sum(), (input, scale, other))
    theirs = torch.autograd.grad(reference(input, scale, other).sin().sum(), (input, scale, other))
    torch.testing.assert_close(ours, theirs)
    per_row = torch.func.vmap(torch.func.grad(lambda *args: op(*args).sum(), argnums=(0, 2)))
    torch.testing.assert_close(per_row(input, scale, other), (scale, scale))


@pytest.mark.parametrize("equal", [((3, 0),), ((1, 0), (2, 1)), ((-1, 0),)])
def test_pairs_that_are_none(equal: Sequence[tuple[int, int]]) -> None:
    with pytest.raises(ContractError, match=r"Gradient\.equal has the pair"):
        fuselab.operator(declared(f"pairs_{equal[0][0] % 7}", equal))
