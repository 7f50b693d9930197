"""Launch plans: what an implementation may do to get one, its outputs, launches and workspaces."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from planned_operator import Planned
from small_cpp_kernels import SOURCE, add, in_a_workspace, mul_backward, scaled_relu
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import fuselab.ops
from fuselab.errors import LaunchError
from fuselab.runtime import launch_plans, launch_recording
from fuselab.runtime.cpp_source import f32, i32, i64

pytestmark = pytest.mark.usefixtures("launcher")


# What an implementation may do.


def strided_output(value: Tensor) -> Tensor:
    output = torch.empty_strided(value.shape, (1, value.shape[0]))
    SOURCE.launch("scaled_relu<float, float>", (value, output, i64(value.numel()), f32(1.0)))
    return output


def viewed_output(value: Tensor) -> Tensor:
    output = torch.empty(value.numel()).view(value.shape)
    flat = value.reshape(-1)
    SOURCE.launch("scaled_relu<float, float>", (flat, output, i64(value.numel()), f32(1.0)))
    return output


def asks_about_dtypes(value: Tensor) -> Tensor:
    dtype = torch.promote_types(value.dtype, torch.result_type(value, 1.0))
    assert torch.can_cast(dtype, torch.float64)
    output = torch.empty(value.shape, dtype=dtype)
    SOURCE.launch("scaled_relu<float, float>", (value, output, i64(value.numel()), f32(1.0)))
    return output


def asks_the_reference_on_meta_tensors(value: Tensor) -> Tensor:
    like = torch.relu(torch.empty_like(value, device="meta"))
    output = torch.empty_strided(like.shape, like.stride())
    SOURCE.launch("scaled_relu<float, float>", (value, output, i64(value.numel()), f32(1.0)))
    return output


@pytest.mark.parametrize(
    "function",
    [strided_output, viewed_output, asks_about_dtypes, asks_the_reference_on_meta_tensors],
)
def test_outputs_keep_their_strides(function: Any) -> None:
    op, value = Planned(function), torch.ones(2, 3)
    first, second = op(value), op(value)
    assert op.runs == 1
    assert second.stride() == first.stride()
    assert second.shape == first.shape
    assert torch.equal(first, second)


def fills_after(value: Tensor) -> Tensor:
    output = scaled_relu(value, 1.0)
    output[0] = 5.0
    return output


def reads_a_value(value: Tensor) -> Tensor:
    return scaled_relu(value, float(value[0].item()))


def launches_nothing(value: Tensor) -> Tensor:
    return torch.empty_like(value).zero_()


def returns_the_argument(value: Tensor) -> Tensor:
    SOURCE.launch("scaled_relu<float, float>", (value, value, i64(value.numel()), f32(1.0)))
    return value


def returns_a_part(value: Tensor) -> Tensor:
    output = torch.empty(2 * value.numel())
    SOURCE.launch("scaled_relu<float, float>", (value, output, i64(value.numel()), f32(1.0)))
    return output[: value.numel()]


CONSTANT = torch.ones(4)


KEPT = torch.empty(4)


def zeroes_the_argument(value: Tensor) -> Tensor:
    return scaled_relu(value.zero_(), 1.0)


def zeroes_a_kept_buffer(value: Tensor) -> Tensor:
    KEPT.zero_()
    return scaled_relu(value, 1.0)


def writes_a_kept_workspace(value: Tensor) -> Tensor:
    SOURCE.launch("scaled_relu<float, float>", (value, KEPT, i64(value.numel()), f32(1.0)))
    return add(value, KEPT)


def uses_another_tensor(value: Tensor) -> Tensor:
    return add(value, CONSTANT)


def returns_a_kept_buffer(value: Tensor) -> Tensor:
    SOURCE.launch("scaled_relu<float, float>", (value, KEPT, i64(value.numel()), f32(1.0)))
    return KEPT


def returns_twice(value: Tensor) -> tuple[Tensor, Tensor]:
    output = scaled_relu(value, 1.0)
    return output, output


def launches_opaquely(value: Tensor) -> Tensor:
    launch_recording.note_opaque_launch("a test")
    return scaled_relu(value, 1.0)


@pytest.mark.parametrize(
    "function",
    [
        fills_after,
        reads_a_value,
        launches_nothing,
        zeroes_the_argument,
        zeroes_a_kept_buffer,
        writes_a_kept_workspace,
        returns_the_argument,
        returns_a_part,
        uses_another_tensor,
        returns_a_kept_buffer,
        returns_twice,
        launches_opaquely,
    ],
)
def test_an_implementation_that_does_more_has_no_plan(function: Any) -> None:
    op = Planned(function)
    for factor in (1.0, 2.0, 3.0):
        value = torch.ones(4) * factor
        expected = function(value.clone())
        result = op(value.clone())
        if isinstance(result, tuple):
            assert result[0] is result[1]
            result, expected = result[0], expected[0]
        assert torch.equal(result, expected)
    assert op.runs == 3
    with launch_recording.record(op.op_id, "cpp", (torch.ones(4),)) as recording:
        assert isinstance(recording, launch_recording.Unrecorded)  # known by now: not watched again


@pytest.mark.parametrize(
    "make",
    [
        lambda value: torch.zeros(value.shape),
        lambda value: torch.zeros_like(value),
        lambda value: value.new_zeros(value.shape),
        lambda value: torch.empty_like(value).zero_(),
        lambda value: scaled_relu(value, 1.0).view(-1).zero_().view(value.shape),
    ],
)
@pytest.mark.parametrize("is_output", [False, True])
def test_memory_filled_with_zeros_is_so_in_every_call(make: Any, is_output: bool) -> None:
    def adds_up(value: Tensor) -> Tensor:
        sums = make(value)
        output = sums if is_output else torch.empty_like(value)
        for _ in range(3):
            SOURCE.launch("add<float>", (sums, value, sums, i64(value.numel())))
        if not is_output:
            SOURCE.launch("scaled_relu<float, float>", (sums, output, i64(value.numel()), f32(1.0)))
        return output

    op = Planned(adds_up)
    for factor in (1.0, 2.0, 5.0):
        assert op(torch.full((3, 5), factor)).eq(3 * factor).all()
    assert op.runs == 1


def test_two_launches_with_a_workspace_are_one_plan_for_all_values() -> None:
    op = Planned(in_a_workspace)
    for width in (1, 300_000):  # the larger ones run without the GIL
        for scale in (1.0, 0.5, 3.0):
            value = torch.linspace(-1, 1, 2 * width).view(2, width)
            assert torch.equal(op(value, scale), 2 * torch.relu(value * scale))
    assert op.runs == 2
    assert launch_plans.count_plans(op.op_id) == 2


def test_a_workspace_is_not_kept_and_not_shared() -> None:
    op = Planned(in_a_workspace)
    op(torch.ones(1 << 20), 1.0)
    outputs = [op(torch.full((1 << 20,), float(step)), 1.0) for step in range(3)]
    assert len({output.data_ptr() for output in outputs}) == 3
    assert [output[-1].item() for output in outputs] == [0.0, 2.0, 4.0]
    held = torch.empty(1 << 21)  # where the workspace lay, perhaps
    held.fill_(7.0)
    assert op(torch.ones(1 << 20), 1.0).eq(2.0).all()
    assert held.eq(7.0).all()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        op(torch.ones(1 << 20), 1.0)
    left = sum(event.self_cpu_memory_usage for event in seen.events())
    assert left <= 0  # the argument, the output and the workspace are gone


def test_an_output_written_by_a_later_launch_only_is_right() -> None:
    def chained(value: Tensor) -> tuple[Tensor, None, Tensor]:
        first, second = torch.empty_like(value), torch.empty_like(value)
        SOURCE.launch("add<float>", (value, value, second, i64(value.numel())))
        SOURCE.launch("add<float>", (second, value, first, i64(value.numel())))
        SOURCE.launch("add<float>", (second, second, second, i64(value.numel())))
        return first, None, second

    op = Planned(chained)
    for factor in (1.0, 2.0):
        first, none, second = op(torch.full((4,), factor))
        assert none is None
        assert first.tolist() == [3 * factor] * 4
        assert second.tolist() == [4 * factor] * 4
    assert op.runs == 1


def test_a_float_looked_at_between_two_launches_gives_one_plan_per_value() -> None:
    def halves(value: Tensor, scale: float) -> Tensor:
        return scaled_relu(scaled_relu(value, scale), 0.5 if scale > 2 else 1.0)

    op = Planned(halves)
    for scale in (1.0, 4.0, 1.0, 4.0):
        assert op(torch.ones(3), scale).tolist() == [1.0 if scale == 1.0 else 2.0] * 3
    assert op.runs == 2


def test_memory_that_no_launch_reads_is_not_a_part_of_the_plan() -> None:
    def allocates_more(value: Tensor) -> Tensor:
        torch.empty(1 << 20)
        torch.empty(0)
        torch.empty(value.shape, device="meta")
        return in_a_workspace(value, 1.0)

    op = Planned(allocates_more)
    for _ in range(2):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            assert op(torch.ones(3)).tolist() == [2.0] * 3
    assert op.runs == 1
    assert max(event.self_cpu_memory_usage for event in seen.events()) < 1 << 20


def test_launches_of_an_operator_within_an_operator_are_the_outer_plans_too() -> None:
    inner = Planned(scaled_relu)
    inner(torch.ones(3), 1.0)

    def outer(value: Tensor, scale: float) -> Tensor:
        output = inner(add(value, value), scale)
        SOURCE.launch("add<float>", (output, value, output, i64(value.numel())))
        return output

    op = Planned(outer)
    for factor in (1.0, 2.0):
        for scale in (3.0, 0.5):
            expected = [(2 * scale + 1) * factor] * 3
            assert op(torch.ones(3) * factor, scale).tolist() == expected
    assert op.runs == 1
    assert inner.hits(torch.ones(3), 1.0)


def test_threads_do_not_share_a_workspace() -> None:
    op = Planned(in_a_workspace)
    op(torch.ones(300_000), 1.0)
    wrong: list[float] = []

    def work(factor: float) -> None:
        value = torch.full((300_000,), factor)
        rights = [bool(op(value, 1.0).eq(2 * factor).all()) for _ in range(20)]
        wrong.extend(factor for right in rights if not right)

    threads = [threading.Thread(target=work, args=(factor,)) for factor in (1.0, 2.0, 3.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert op.runs == 1


def test_an_exception_keeps_no_plan_and_ends_the_recording() -> None:
    def fails(value: Tensor) -> Tensor:
        scaled_relu(value, 1.0)
        raise RuntimeError("no")

    op = Planned(fails)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            op(torch.ones(3))
    assert launch_plans.count_plans(op.op_id) == 0
    assert launch_recording.thread.recording is None
    assert torch._C._len_torch_dispatch_stack() == 0  # torch's own flag is not a thread's


def test_a_kernel_that_throws_in_a_plan_is_a_launch_error() -> None:
    def throwing(value: Tensor, kind: int) -> Tensor:
        output = torch.empty_like(value)
        SOURCE.launch("throws", (output, i32(kind)))
        return output

    op = Planned(throwing)
    with pytest.raises(LaunchError, match="own words"):
        op(torch.ones(1), 0)
    described = (False, SOURCE._entries["throws"][0], 0, (1, 1, 1), (1, 1, 1), 0)
    parameters = [("t", 2, 0, -1, 0), ("i", 0, 0, -1, 0)]
    args = (torch.ones(1), 0)
    assert launch_plans.native is not None
    steps = [(described, parameters, 4)]
    launch_plans.native.keep(op.op_id, "cpp", args, steps, [torch.ones(1)], 1, False, False)
    with pytest.raises(LaunchError, match="the kernel's own words"):
        launch_plans.lookup(op.op_id, "cpp", args)


# Arguments that share memory, and backwards.


@pytest.mark.parametrize("function", [add, lambda a, b: add(a.view(2, 2), b.view(2, 2)).view(4)])
def test_one_tensor_twice_is_not_two_tensors(function: Any) -> None:
    op = Planned(function)
    value, other = torch.ones(4), torch.full((4,), 5.0)
    for _ in range(2):
        assert op(value, value).tolist() == [2.0] * 4
        assert op(value, other).tolist() == [6.0] * 4
        assert op(other, other.view(4)).tolist() == [10.0] * 4
        assert op(other, value).tolist() == [6.0] * 4
    assert op.runs == 2


# PyTorch's operators between launches.


def copies(value: Tensor) -> Tensor:
    return scaled_relu(value.contiguous() + 0, 1.0)


def returns_a_workspace_of_a_copy(value: Tensor) -> Tensor:
    workspace = scaled_relu(value, 1.0)
    return scaled_relu(workspace.clone(), 1.0)


def zeroes_a_part(value: Tensor) -> Tensor:
    output = scaled_relu(value, 1.0)
    output[1:].zero_()
    return add(output, value)


def adds_at_places(value: Tensor) -> Tensor:
    sums = torch.zeros(2).index_add_(0, torch.arange(4) // 2, value)
    return scaled_relu(sums, 1.0)


def sorts(value: Tensor) -> tuple[Tensor, Tensor]:
    ordered, places = torch.sort(scaled_relu(value, 1.0), descending=True)
    return add(ordered, value), places


def joins(value: Tensor) -> Tensor:
    return scaled_relu(torch.cat([value, value[1:], scaled_relu(value, 2.0)]), 1.0)


def returns_a_call_s_result(value: Tensor) -> Tensor:
    return torch.cumsum(scaled_relu(value, 1.0), 0)


@pytest.mark.parametrize(
    "function",
    [
        copies,
        returns_a_workspace_of_a_copy,
        zeroes_a_part,
        adds_at_places,
        sorts,
        joins,
        returns_a_call_s_result,
        lambda value: torch.mm(scaled_relu(value, 1.0).exp().view(2, 2), value.view(2, 2)),
        lambda value: add(value, torch.full_like(value, 0.5)),
        lambda value: add(value, value.view(2, 2).t().reshape(4)),
        lambda value: add(value, scaled_relu(value.view(2, 2).t().contiguous(), 2.0)),
        lambda value: add(value.to(torch.float32, copy=True).mul_(3.0), value),
        lambda value: add(value.double().to(value.dtype), value.flip(0)),
    ],
)
def test_calls_between_launches_are_made_in_every_call(function: Any) -> None:
    op = Planned(function)
    for _ in range(4):
        value = torch.randn(4)
        expected, result = function(value.clone()), op(value.clone())
        torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert op.runs == 1


def test_results_of_calls_are_not_kept_and_not_shared() -> None:
    op = Planned(returns_a_call_s_result)
    op(torch.ones(1 << 18))
    first, second = op(torch.ones(1 << 18)), op(torch.ones(1 << 18))
    assert first.data_ptr() != second.data_ptr()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        op(torch.ones(1 << 18))
    assert sum(event.self_cpu_memory_usage for event in seen.events()) <= 0


def test_a_float_given_to_a_call_gives_one_plan_per_value() -> None:
    op = Planned(lambda value, scale: torch.mul(scaled_relu(value, scale), scale))
    for scale in (2.0, 3.0, 2.0, 3.0):
        assert op(torch.ones(3), scale).tolist() == [scale * scale] * 3
    assert op.runs == 2


def test_a_call_of_a_constant_tensor_has_no_plan() -> None:
    op = Planned(lambda value: scaled_relu(torch.add(value, CONSTANT), 1.0))
    for factor in (1.0, 2.0):
        assert op(torch.full((4,), factor)).tolist() == [factor + 1] * 4
    assert op.runs == 2


def test_a_random_number_is_drawn_in_every_call() -> None:
    op = Planned(lambda value: add(value, torch.rand_like(value)))
    assert not torch.equal(op(torch.zeros(64)), op(torch.zeros(64)))
    assert op.runs == 2


def test_a_call_that_fails_later_raises_its_own_error() -> None:
    def chooses(value: Tensor, places: Tensor) -> Tensor:
        return scaled_relu(torch.index_select(value, 0, places), 1.0)

    op, value = Planned(chooses), torch.ones(4)
    assert op(value, torch.tensor([1, 2])).tolist() == [1.0, 1.0]
    for _ in range(2):
        with pytest.raises(IndexError):
            op(value, torch.tensor([1, 9]))
    assert op(value, torch.tensor([3, 0])).tolist() == [1.0, 1.0]
    assert op.runs == 1


def test_without_a_launch_there_is_no_plan() -> None:
    op = Planned(lambda value: torch.cumsum(value, 0))
    for _ in range(2):
        assert op(torch.ones(3)).tolist() == [1.0, 2.0, 3.0]
    assert op.runs == 2


def halves(value: Tensor) -> Tensor:
    first, second = value.chunk(2)
    return add(first, second)


def parts_of_parts(value: Tensor) -> Tensor:
    second = value[2:].view(2, 3).unbind()[1]
    return add(second[0:2], second[1:])


def part_of_another(value: Tensor, other: Tensor) -> Tensor:
    return add(value[2:], other)


@pytest.mark.parametrize("function", [halves, parts_of_parts])
def test_a_part_of_an_argument_is_read_where_the_argument_lies(function: Any) -> None:
    op = Planned(function)
    for _ in range(3):
        value = torch.randn(8)
        assert torch.equal(op(value), function(value))
        inside = torch.randn(24)[8:16]  # an argument that is a part of another tensor itself
        assert torch.equal(op(inside), function(inside))
    assert op.runs == 1


def test_a_part_is_not_taken_for_another_argument_that_begins_there() -> None:
    """The first call's second argument begins where the part of the first one does; in the second
    call they share nothing."""
    op, whole = Planned(part_of_another), torch.randn(8)
    assert torch.equal(op(whole[:4], whole[2:4]), whole[2:4] * 2)
    one, other = torch.randn(4), torch.randn(4)[2:]  # as far from 16 bytes as before
    assert torch.equal(op(one, other), one[2:] + other)
    assert torch.equal(op(one.clone(), other), one[2:] + other)
    assert op.runs == 1


def test_a_view_from_the_begin_of_the_storage_has_no_plan() -> None:
    """The argument's offset in its storage is no part of a plan's key."""

    def from_the_begin(value: Tensor) -> Tensor:
        return scaled_relu(value.as_strided((2,), (1,), 0), 1.0)

    op, whole = Planned(from_the_begin), torch.rand(16)
    for part in (whole[4:8], whole[8:12], whole[4:8]):
        assert torch.equal(op(part), whole[:2])
    assert op.runs == 3


def test_a_product_of_a_part_of_an_argument() -> None:
    def products(value: Tensor, weight: Tensor) -> Tensor:
        left, right = value.chunk(2, dim=1)
        return add(torch.mm(left, weight), torch.mm(right, weight))

    op = Planned(products)
    for _ in range(3):
        value, weight = torch.randn(3, 8), torch.randn(4, 2)
        torch.testing.assert_close(op(value, weight), value[:, :4] @ weight + value[:, 4:] @ weight)
    assert op.runs == 1


@pytest.mark.parametrize("needs", [(True, True), (True, False), (False, True)])
def test_a_backward_returns_none_where_nothing_is_needed(needs: tuple[bool, bool]) -> None:
    op = Planned(mul_backward)
    grad, left, right = torch.randn(3, 6).unbind()
    for _ in range(2):
        grads = op(needs, grad, left, right)
        for need, got, wanted in zip(needs, grads, (grad * right, grad * left), strict=True):
            assert torch.equal(got, wanted) if need else got is None
    assert op.runs == 1
    assert op.hits(list(needs), grad, left, right)
    assert not op.hits((not needs[0], needs[1]), grad, left, right)


def test_a_recorded_call_is_freed_without_the_garbage_collector() -> None:
    """It holds the outputs, and so the graph behind them, whose accumulators of gradients belong to
    the stream of the first call: they would break a CUDA graph that is captured later."""
    bias_activation = fuselab.ops.bias_activation
    bias_activation(torch.ones(2, 3), torch.ones(3), "relu")  # torch's own first imports are cycles
    value = torch.ones(7, 3, requires_grad=True)
    gc.collect()
    gc.disable()
    try:
        output = bias_activation(value, torch.ones(3), "relu")  # records
        torch.autograd.grad(output, value, torch.ones_like(output))  # and the backward
        torch.autograd.graph.get_gradient_edge(value).node.metadata["of"] = "the first call"
        del output
        assert not torch.autograd.graph.get_gradient_edge(value).node.metadata
    finally:
        gc.enable()


def test_an_implementation_that_fails_midway_leaves_no_recording() -> None:
    def fails(value: Tensor, scale: float) -> Tensor:
        output = scaled_relu(value, scale)
        if scale > 1:
            raise LaunchError("midway.")
        return output

    op, value = Planned(fails), torch.ones(3)
    for _ in range(2):
        with pytest.raises(LaunchError, match="midway"):
            op(value, 2.0)
        assert launch_recording.thread.recording is None
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None
    for _ in range(2):
        assert op(value, 1.0).tolist() == [1.0] * 3
    assert op.runs == 3
