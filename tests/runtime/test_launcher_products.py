"""Launch plans that multiply matrices by PyTorch's library between launches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from planned_operator import Planned
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab.runtime import launch_plans
from fuselab.runtime.cpp_source import CppSource, f32, i64

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))
pytestmark = pytest.mark.usefixtures("launcher")
Grads = tuple[Tensor | None, ...]


def relu(value: Tensor, output: Tensor) -> Tensor:
    args = (value, output, i64(value.numel()), f32(1.0))
    SOURCE.launch("scaled_relu<float, float>", args)
    return output


def gradients(needs: Sequence[bool], grad: Tensor, input: Tensor, weight: Tensor) -> Grads:
    """As a linear layer's: a pass, and a product for each gradient, one of them seen as a view."""
    total = relu(grad, torch.empty_like(grad)).view(-1, weight.shape[0])
    rows = input.reshape(-1, input.shape[-1])
    return (
        torch.mm(total, weight).view(input.shape) if needs[0] else None,
        torch.mm(total.t(), rows) if needs[1] else None,
    )


def exact(needs: Sequence[bool], grad: Tensor, input: Tensor, weight: Tensor) -> Grads:
    total = torch.relu(grad).view(-1, weight.shape[0])
    rows = input.reshape(-1, input.shape[-1])
    return (
        (total @ weight).view(input.shape) if needs[0] else None,
        total.t() @ rows if needs[1] else None,
    )


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    shapes = ((2, 3, 5), (2, 3, 7), (5, 7))
    grad, input, weight = (torch.randn(shape, generator=random) for shape in shapes)
    return grad, input, weight


def test_products_of_the_present_call_and_for_each_set_of_needs() -> None:
    op, held = Planned(gradients), []
    for seed in range(4):
        tensors = drawn(seed)
        for needs in ((True, True), (True, False), (False, True)):
            ours, theirs = op(needs, *tensors), exact(needs, *tensors)
            held.append((ours, tensors))  # so that what comes next lies elsewhere
            assert [grad is not None for grad in ours] == list(needs)
            for one, other in zip(ours, theirs, strict=True):
                assert one is None or torch.equal(one, other)
                assert one is None or one.stride() == other.stride()
    assert op.runs == 3


@pytest.mark.parametrize(
    "other",
    [
        lambda grad, input, weight: (grad, input, weight.t().contiguous().t()),
        lambda grad, input, weight: (grad, F.pad(input, (0, 1))[..., :-1], weight),
        lambda grad, input, weight: (grad[:1], input[:1], weight),
        lambda grad, input, weight: (grad, input, torch.ones(36)[1:].view(5, 7)),
        lambda grad, input, weight: (grad, input[..., :5], torch.ones(5, 5)),
    ],
)
def test_other_layouts_and_sizes_have_plans_of_their_own(other: Callable[..., Any]) -> None:
    op, needs = Planned(gradients), (True, True)
    op(needs, *drawn(0))
    tensors = other(*drawn(1))
    for runs in (2, 2):
        for one, own in zip(op(needs, *tensors), exact(needs, *tensors), strict=True):
            torch.testing.assert_close(one, own)
        assert op.runs == runs


@pytest.mark.parametrize(
    "product",
    [
        lambda input, weight, bias: torch.mm(input, weight.t()),
        lambda input, weight, bias: torch.addmm(bias, input, weight.t()),
        lambda input, weight, bias: torch._addmm_activation(bias, input, weight.t()),
        lambda input, weight, bias: torch._addmm_activation(bias, input, weight.t(), use_gelu=True),
    ],
)
def test_every_product_alone_and_written_over_by_a_launch(product: Callable[..., Tensor]) -> None:
    alone = Planned(product)
    launched = Planned(lambda *args: relu(total := product(*args), total))
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        args = [torch.randn(shape, generator=random) for shape in ((4, 5), (6, 5), (6,))]
        total = product(*args)
        assert torch.equal(alone(*args), total)
        assert torch.equal(launched(*args), torch.relu(total))
    assert alone.runs == launched.runs == 1


def test_products_of_a_workspace_its_parts_and_items_of_a_list() -> None:
    def chained(factors: Sequence[Tensor]) -> Tensor:
        workspace = factors[0].new_empty((2, 4, 4))
        relu(factors[0], workspace[0])
        relu(factors[1], workspace[1])
        corner = torch.mm(workspace[1, 1:, :3], factors[1][:3].t()[:3])
        return torch.mm(corner, workspace[0].t()[1:])

    op = Planned(chained)
    for seed in range(3):
        random = torch.Generator().manual_seed(seed)
        left, right = (torch.randn(4, 4, generator=random) for _ in range(2))
        corner = right.relu()[1:, :3] @ right[:3].t()[:3]
        assert torch.equal(op([left, right]), corner @ left.relu().t()[1:])
    assert op.runs == 1


CONSTANT = torch.eye(4)


@pytest.mark.parametrize(
    "function",
    [
        lambda value: torch.mm(value, CONSTANT),
        lambda value: torch.addmm(value, value, value, beta=2),
        lambda value: torch.addmm(value, value, value, alpha=0.5),
        lambda value: torch.mm(value, value, out=value.new_empty(4, 4)),
        lambda value: torch.mm(value, value)[:2],
        lambda value: torch.mm(value[:, :0], value[:0]),
        lambda value: torch.mm(value.to(torch.complex64).conj(), value.to(torch.complex64)),
    ],
)
def test_a_product_of_something_else_has_no_plan(function: Callable[[Tensor], Tensor]) -> None:
    op = Planned(function)
    for factor in (1.0, 2.0):
        value = torch.full((4, 4), factor)
        assert torch.equal(op(value), function(value))
    assert op.runs == 2


def test_a_conjugate_is_not_its_tensor() -> None:
    op = Planned(lambda left, right: torch.mm(left.conj(), right))
    for factor in (1.0, 2.0):
        left = torch.full((3, 3), complex(0, factor))
        assert torch.equal(op(left, left.clone()), left.conj() @ left)
    assert op.runs == 2


def test_precision_and_deterministic_algorithms_are_other_keys() -> None:
    op, args = Planned(gradients), ((True, True), *drawn(0))
    op(*args)
    try:
        torch.set_float32_matmul_precision("high")
        assert not op.hits(*args)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(True)
        assert not op.hits(*args)
    finally:
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)
    assert op.hits(*args)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not op.hits(*args)


def test_operands_that_need_gradients_get_none_from_a_detached_plan() -> None:
    """As autograd's own nodes call it; the product must not ask for a gradient, nor count as a
    change of what it read."""
    op, (grad, input, weight) = Planned(gradients), drawn(0)
    op((True, True), grad, input, weight)
    leaf = weight.clone().requires_grad_()
    args = ((True, True), grad, input, leaf)
    launch_plans.keep_differentiable(op.op_id, "cpp", args)
    found = launch_plans.lookup(op.op_id, "cpp", args, True, True)
    for one, own in zip(found, exact((True, True), grad, input, weight), strict=True):
        assert torch.equal(one, own) and not one.requires_grad and one._version == 0
    assert leaf._version == 0
    with torch.inference_mode():
        assert op.hits((True, True), grad, input, weight)


def test_the_profiler_sees_the_products_within_the_operator() -> None:
    op, args = Planned(gradients), ((True, True), *drawn(0))
    op(*args)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        op(*args)
    names = [event.name for event in seen.events()]
    assert names.count("test::gradients") == 1 and names.count("aten::mm") == 2
