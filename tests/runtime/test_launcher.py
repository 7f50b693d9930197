"""Launch plans: when a call may take one, that it then computes the same, and when it must not."""

from __future__ import annotations

import gc
import math
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_operator import Planned
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import fuselab.ops
from fuselab.errors import LaunchError
from fuselab.measure.cuda_graph import captured
from fuselab.runtime import kernel_launch, launch_plans, launch_recording
from fuselab.runtime.cpp_source import CppSource, f32, f64, i32, i64
from fuselab.runtime.cuda_source import CudaSource

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))


def scaled_relu(value: Tensor, scale: float, name: str = "relu") -> Tensor:
    output = torch.empty_like(value)
    args = (value, output, i64(value.numel()), f32(scale))
    SOURCE.launch("scaled_relu<float, float>", args)
    return output


def add(left: Tensor, right: Tensor) -> Tensor:
    output = torch.empty_like(left)
    SOURCE.launch("add<float>", (left, right, output, i64(left.numel())))
    return output


def mul_backward(
    needs: tuple[bool, bool], grad: Tensor, left: Tensor, right: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    grads = tuple(torch.empty_like(grad) if need else None for need in needs)
    SOURCE.launch("mul_backward<float>", (grad, left, right, *grads, i64(grad.numel())))
    return grads  # type: ignore[return-value]


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    assert launch_plans.start()


@pytest.fixture
def op() -> Planned:
    return Planned(scaled_relu)


def test_the_second_call_takes_the_plan_and_computes_the_same(op: Planned) -> None:
    for seed in range(3):
        value = torch.randn(3, 5, generator=torch.Generator().manual_seed(seed))
        output = op(value, 2.0)
        assert torch.equal(output, torch.relu(value * 2.0))
        assert output.data_ptr() != value.data_ptr()
    assert op.runs == 1


@pytest.mark.parametrize(
    "other",
    [
        lambda: (torch.ones(4, 4, dtype=torch.float64), 2.0),
        lambda: (torch.ones(4, 5), 2.0),
        lambda: (torch.ones(16), 2.0),
        lambda: (torch.ones(4, 4).t(), 2.0),
        lambda: (torch.ones(8, 4)[::2], 2.0),
        lambda: (torch.ones(4, 1).expand(4, 4), 2.0),
        lambda: (torch.ones(17)[1:].view(4, 4), 2.0),
        lambda: (torch.ones(4, 4), 2.0, "gelu"),
        lambda: (torch.ones(4, 4), 2.0, "relu "),
        lambda: (torch.ones(4, 4), 2.0, None),
        lambda: (torch.ones(4, 4), 2.0, torch.float32),
        lambda: (torch.ones(4, 4), 2.0, (1, 2)),
        lambda: (torch.ones(4, 4), 2.0, True),
        lambda: (torch.ones(4, 4), 2.0, 1),
        lambda: (torch.ones(4, 4), None),
        lambda: (torch.ones(4, 4), 2.0, "relu", 1),
        lambda: (torch.ones(4, 4),),
        lambda: (2.0, torch.ones(4, 4)),
    ],
)
def test_whatever_differs_but_a_float_has_no_plan(op: Planned, other: Any) -> None:
    op(torch.ones(4, 4), 2.0)
    op(torch.ones(4, 4), 2.0, "relu")
    assert op.hits(torch.ones(4, 4), 2.0)
    assert op.hits(torch.ones(4, 4), 2.0, "relu")
    assert not op.hits(*other())


def test_every_alignment_up_to_16_bytes_is_another_key(op: Planned) -> None:
    """An implementation may choose 8 bytes at a time by what it finds."""
    memory = torch.ones(16)
    for runs, first in enumerate((0, 1, 2), 1):  # at 16, 4 and 8 bytes
        for begin in (first, first + 4):
            assert op(memory[begin : begin + 3], 2.0).tolist() == [2.0] * 3
            assert op.runs == runs


@pytest.mark.parametrize(
    ("kept", "asked"),
    [((1, 2), (1, 3)), ((1, 2), (1, 2, 3)), ((True,), (1,)), ((None, 1), (1, None)), (0, False)],
)
def test_plain_values_are_compared_by_type_and_value(kept: Any, asked: Any) -> None:
    op = Planned(lambda value, plain: scaled_relu(value, 1.0))
    op(torch.ones(3), kept)
    assert op.hits(torch.ones(3), kept)
    assert not op.hits(torch.ones(3), asked)


def test_implementations_have_plans_of_their_own(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    assert launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 1.0)) is not None
    assert launch_plans.lookup(op.op_id, "auto", (torch.ones(3), 1.0)) is None


@pytest.mark.parametrize(
    "value",
    [object(), 1 + 2j, 2**80, {"a": 1}, (1.5,), ("a",), ((1,),), torch.Size([2, 3])],
)
def test_values_of_other_types_have_no_plan(value: Any) -> None:
    op = Planned(lambda tensor, plain: scaled_relu(tensor, 1.0))
    for _ in range(2):
        assert torch.equal(op(torch.ones(3), value), torch.ones(3))
    assert op.runs == 2


# Floats.


def test_one_plan_for_all_values_of_a_float_handed_straight_on(op: Planned) -> None:
    value = torch.tensor([1.0, -1.0, 3.0])
    for scale in (1.0, 0.1, -2.0, 1e-40, 0.0, math.inf):
        assert torch.equal(op(value, scale).nan_to_num(7), torch.relu(value * scale).nan_to_num(7))
    assert bool(op(value, math.nan)[0] == 0) == bool(scaled_relu(value, math.nan)[0] == 0)
    assert op.runs == 1
    assert launch_plans.count_plans(op.op_id) == 1


def test_an_int_for_a_float_argument_takes_the_same_plan(op: Planned) -> None:
    op(torch.ones(3), 1.5)
    assert launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 2)).tolist() == [2.0] * 3
    assert not op.hits(torch.ones(3), True)


def test_64_bit_floats_keep_their_bits() -> None:
    def scaled(value: Tensor, scale: float) -> Tensor:
        output = torch.empty_like(value)
        args = (value, output, i64(value.numel()), f64(scale))
        SOURCE.launch("scaled_relu<double, double>", args)
        return output

    op, value = Planned(scaled), torch.ones(2, dtype=torch.float64)
    op(value, 1.0)
    assert op(value, 0.1).tolist() == [0.1, 0.1]
    assert op.runs == 1


@pytest.mark.parametrize(
    "scaled",
    [
        lambda value, scale: scaled_relu(value, scale * 1.0),
        lambda value, scale: scaled_relu(value, float(scale)),
        lambda value, scale: scaled_relu(value, math.sqrt(scale) ** 2),
        lambda value, scale: scaled_relu(value, scale) if scale > 0 else value * scale,
        lambda value, scale: add(value, value) if scale == 2.0 else scaled_relu(value, scale),
    ],
)
def test_a_float_that_is_looked_at_gives_one_plan_per_value(scaled: Any) -> None:
    op, value = Planned(scaled), torch.ones(3)
    for scale in (1.0, 2.0, 3.0, 4.0, 1.0, 2.0, 3.0, 4.0):
        assert op(value, scale).tolist() == pytest.approx([scale] * 3)
    assert op.runs == 4
    assert not op.hits(value, 5.0)


def test_plus_and_minus_zero_are_different_values() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, math.copysign(1.0, scale)))
    assert op(torch.ones(2), 0.0).tolist() == [1.0, 1.0]
    assert op(torch.ones(2), -0.0).tolist() == [0.0, 0.0]
    assert op(torch.ones(2), 0.0).tolist() == [1.0, 1.0]


def test_a_float_that_is_ignored_gives_one_plan_per_value() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, 1.0))
    op(torch.ones(2), 1.0)
    assert op.hits(torch.ones(2), 1.0)
    assert not op.hits(torch.ones(2), 2.0)


def test_ever_new_values_stop_being_recorded() -> None:
    op = Planned(lambda value, scale: scaled_relu(value, scale * 1.0))
    for step in range(80):
        assert op(torch.ones(1), float(step)).item() == step
    assert isinstance(
        launch_recording.record(op.op_id, "cpp", (torch.ones(1), 99.0)), launch_recording.Unrecorded
    )


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


@pytest.mark.parametrize("function", [strided_output, viewed_output, asks_about_dtypes])
def test_outputs_keep_their_strides(function: Any) -> None:
    op, value = Planned(function), torch.ones(2, 3)
    first, second = op(value), op(value)
    assert op.runs == 1
    assert second.stride() == first.stride()
    assert second.shape == first.shape
    assert torch.equal(first, second)


def copies(value: Tensor) -> Tensor:
    return scaled_relu(value.contiguous() + 0, 1.0)


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


def returns_a_workspace_of_a_copy(value: Tensor) -> Tensor:
    workspace = scaled_relu(value, 1.0)
    return scaled_relu(workspace.clone(), 1.0)


def zeroes_the_argument(value: Tensor) -> Tensor:
    return scaled_relu(value.zero_(), 1.0)


def zeroes_a_part(value: Tensor) -> Tensor:
    output = scaled_relu(value, 1.0)
    output[1:].zero_()
    return add(output, value)


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
        copies,
        fills_after,
        reads_a_value,
        launches_nothing,
        returns_a_workspace_of_a_copy,
        zeroes_the_argument,
        zeroes_a_part,
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


# Several launches, and workspaces between them.


def in_a_workspace(value: Tensor, scale: float) -> Tensor:
    """2 relu(scale value), by way of a workspace twice as large as need be."""
    workspace = torch.empty(2 * value.numel()).view(2, -1)[1]
    args = (value, workspace, i64(value.numel()), f32(scale))
    SOURCE.launch("scaled_relu<float, float>", args)
    output = torch.empty_like(value)
    SOURCE.launch("add<float>", (workspace, workspace, output, i64(value.numel())))
    return output


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
    parameters = [("t", 2, 0, 0), ("i", 0, 0, 0)]
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


def test_empty_tensors_have_no_plan(op: Planned) -> None:
    for _ in range(2):
        assert op(torch.empty(0, 3), 1.0).shape == (0, 3)
    assert op.runs == 2


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


# Who may not be bypassed.


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class SeenFunction(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "context",
    [
        Seen,
        SeenFunction,
        lambda: torch.autocast("cpu"),
        lambda: torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True),
    ],
)
def test_a_mode_is_not_bypassed(op: Planned, context: Any) -> None:
    value = torch.ones(3)
    op(value, 1.0)
    with context():
        assert not op.hits(value, 1.0)
    assert op.hits(value, 1.0)


def test_torch_jit_trace_is_not_bypassed(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    seen = []

    def traced(value: Tensor) -> Tensor:
        seen.append(op.hits(value, 1.0))
        return value + 1

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(traced, (torch.ones(3),), check_trace=False)
    assert seen == [False]


def test_functorch_is_not_bypassed(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    seen = []

    def inside(value: Tensor) -> Tensor:
        seen.append(op.hits(value, 1.0))
        seen.append(op.hits(torch.ones(3), 1.0))
        return value.sum()

    torch.func.vmap(inside)(torch.ones(2, 3))
    torch.func.grad(inside)(torch.ones(3))
    torch.func.jvp(inside, (torch.ones(3),), (torch.ones(3),))
    assert not any(seen)
    assert len(seen) == 6


def test_forward_mode_tensors_have_no_plan(op: Planned) -> None:
    value = torch.ones(3)
    op(value, 1.0)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(value, torch.ones(3))
        assert not op.hits(dual, 1.0)
        with torch.no_grad():
            assert not op.hits(dual, 1.0)
    assert op.hits(value, 1.0)


def test_tensors_that_need_a_gradient_have_no_plan_unless_gradients_are_off(op: Planned) -> None:
    value = torch.ones(3, requires_grad=True)
    parameter = torch.nn.Parameter(torch.ones(3))
    op(torch.ones(3), 1.0)
    for tensor in (value, parameter):
        assert not op.hits(tensor, 1.0)
        with torch.no_grad():
            assert op.hits(tensor, 1.0)
            assert not op(tensor, 1.0).requires_grad


def test_inference_tensors_have_plans_and_give_inference_tensors(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    with torch.inference_mode():
        held = launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 1.0))
        assert held.is_inference()
    assert not launch_plans.lookup(op.op_id, "cpp", (torch.ones(3), 1.0)).is_inference()


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).as_subclass(Subclass),
        lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch._efficientzerotensor(3),
        lambda: torch.ones(3).to_mkldnn(),
    ],
)
def test_other_tensors_have_no_plan(op: Planned, make: Any) -> None:
    op(torch.ones(3), 1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tensor = make()
    assert not op.hits(tensor, 1.0)
    assert not launch_plans.native.wanted(op.op_id, "cpp", (tensor, 1.0))  # type: ignore[union-attr]


def test_two_devices_have_no_plan() -> None:
    op = Planned(add)
    op(torch.ones(3), torch.ones(3))
    assert not op.hits(torch.ones(3), torch.ones(3, device="meta"))


# State that the plan does not hold.


def test_deterministic_algorithms_are_another_key(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    torch.use_deterministic_algorithms(True)
    try:
        assert not op.hits(torch.ones(3), 1.0)
    finally:
        torch.use_deterministic_algorithms(False)
    assert op.hits(torch.ones(3), 1.0)


def test_the_number_of_threads_is_another_key(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not op.hits(torch.ones(3), 1.0)
    finally:
        torch.set_num_threads(before)
    assert op.hits(torch.ones(3), 1.0)


def test_the_profiler_sees_the_operator_and_its_shapes(op: Planned) -> None:
    value = torch.ones(3, 5)
    op(value, 1.0)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        op(value, 2.0)
    events = [event for event in seen.events() if event.name == "test::scaled_relu"]
    assert [event.input_shapes[0] for event in events] == [[3, 5]]
    assert op.runs == 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        launch_plans.lookup(op.op_id, "cpp", (value, 2.0), False)
    assert "test::scaled_relu" not in [event.name for event in seen.events()]


def test_forget_drops_the_plans(op: Planned) -> None:
    op(torch.ones(3), 1.0)
    launch_plans.forget(op.op_id)
    assert not op.hits(torch.ones(3), 1.0)
    assert launch_plans.count_plans(op.op_id) == 0


def test_plans_are_bounded() -> None:
    op = Planned(lambda value, plain: scaled_relu(value, 1.0))
    value = torch.ones(1)
    launch_recording.record(op.op_id, "cpp", (value, 0))
    for number in range(4100):
        launch_plans.native.reject(op.op_id, "cpp", (value, number))  # type: ignore[union-attr]
        assert launch_plans.count_plans(op.op_id) <= 4096
    assert launch_plans.count_plans(op.op_id) == 4


def test_threads_share_plans_and_record_apart(op: Planned) -> None:
    errors = []

    def work(width: int) -> None:
        value = torch.full((width, 300_000), float(width))  # over 1 MiB: without the GIL
        for step in range(1, 6):
            result = op(value, float(step))
            if not bool((result == width * step).all()):
                errors.append((width, step))

    threads = [threading.Thread(target=work, args=(width,)) for width in (1, 2, 1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert launch_plans.count_plans(op.op_id) >= 2


@pytest.mark.parametrize("args", [(10**6, "cpp", ()), ("x", "cpp", ()), (0, "cpp", [])])
def test_a_wrong_call_is_a_type_error(args: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        launch_plans.lookup(*args)


@pytest.fixture
def without_native(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(launch_plans, "native", None)
    yield


def test_without_the_extension_launches_go_through_ctypes(without_native: None) -> None:
    value = torch.tensor([-1.0, 2.0])
    assert scaled_relu(value, 0.5).tolist() == [0.0, 1.0]
    with pytest.raises(LaunchError, match="own words"):
        SOURCE.launch("throws", (value, i32(0)))
    with launch_recording.record(0, "cpp", (value,)) as recording:
        recording.finish(value)
        assert recording.args == (value,)


def test_without_a_compiler_one_warning_and_no_plans(tmp_path: Path) -> None:
    script = (
        "import torch, warnings\n"
        "from fuselab.runtime import launch_plans, launch_recording\n"
        "op = launch_plans.register('a::b')\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        args = (torch.ones(2),)\n"
        "        assert launch_plans.lookup(op, 'cpp', args) is None\n"
        "        with launch_recording.record(op, 'cpp', args) as recording:\n"
        "            recording.finish(args[0])\n"
        "print([str(warning.message) for warning in caught])\n"
    )
    environment = {
        **os.environ,
        "PATH": str(tmp_path),
        "CXX": "",
        "FUSELAB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert result.stdout.count("the C++ launcher cannot be used") == 1, result.stderr
    assert "install g++" in result.stdout


# On a GPU.

CUDA = CudaSource(Path(__file__).with_name("kernels.cu"))


def cuda_scaled_relu(value: Tensor, scale: float) -> Tensor:
    output = torch.empty_like(value)
    grid = (-(-value.numel() // 256), 1, 1)
    args = (value, output, i64(value.numel()), f32(scale))
    CUDA.launch("scaled_relu<float>", grid, (256, 1, 1), args)
    return output


@pytest.mark.gpu
def test_a_cuda_plan_computes_the_same_for_all_values() -> None:
    op = Planned(cuda_scaled_relu)
    for scale in (1.0, 0.5, -2.0):
        value = torch.randn(1000, device="cuda")
        assert torch.equal(op(value, scale), torch.relu(value * scale))
    assert op.runs == 1
    assert not op.hits(torch.randn(1001, device="cuda")[1:], 1.0)
    assert not op.hits(torch.randn(1000), 1.0)


@pytest.mark.gpu
def test_a_cuda_plan_launches_on_the_current_stream() -> None:
    op, value = Planned(cuda_scaled_relu), torch.ones(1 << 20, device="cuda")
    op(value, 1.0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        value.fill_(3.0)
        output = op(value, 1.0)
    assert not stream.query()
    stream.synchronize()
    assert bool((output == 3.0).all())
    assert op.runs == 1


@pytest.mark.gpu
def test_a_cuda_plan_can_be_captured_and_replayed() -> None:
    op, value = Planned(cuda_scaled_relu), torch.ones(1000, device="cuda")
    op(value, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = op(op(value, 2.0), 3.0)
    assert op.runs == 1
    value.fill_(5.0)
    graph.replay()
    assert bool((output == 30.0).all())


@pytest.mark.gpu
def test_a_cuda_plan_runs_in_a_thread_that_has_not_used_cuda() -> None:
    op, value = Planned(cuda_scaled_relu), torch.ones(8, device="cuda")
    op(value, 1.0)
    results: list[Tensor] = []
    thread = threading.Thread(target=lambda: results.append(op(value, 4.0)))
    thread.start()
    thread.join()
    assert results[0].tolist() == [4.0] * 8
    assert op.runs == 1


def cuda_relu_of_sum(value: Tensor, scale: float) -> Tensor:
    """By way of a workspace of zeros as large as ``value``, of which the last number is the sum."""
    workspace, output = torch.zeros_like(value), value.new_empty(())
    grid = (-(-value.numel() // 256), 1, 1)
    CUDA.launch("add_up", grid, (256, 1, 1), (value, workspace[-1:], i64(value.numel())))
    args = (workspace[-1:], output, i64(1), f32(scale))
    CUDA.launch("scaled_relu<float>", (1, 1, 1), (32, 1, 1), args)
    return output


def cuda_twice(value: Tensor, scale: float) -> Tensor:
    """scale^2 relu(value), by way of an uninitialised workspace."""
    return cuda_scaled_relu(cuda_scaled_relu(value, scale), scale)


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [1, 255, 257, 1 << 20])
def test_cuda_plans_of_two_launches_compute_the_same_from_other_memory(numel: int) -> None:
    summed, twice = Planned(cuda_relu_of_sum), Planned(cuda_twice)
    held = []
    for step, scale in enumerate((1.0, 0.5, 2.0, -1.0)):
        value = torch.full((numel,), 1.0 + step, device="cuda")
        held.append(value)  # so that the next one lies elsewhere
        assert summed(value, scale).item() == max(0.0, numel * (1.0 + step) * scale)
        assert bool((twice(value, abs(scale)) == (1.0 + step) * scale * scale).all())
    assert summed.runs == twice.runs == 1


@pytest.mark.gpu
def test_a_cuda_plan_of_two_launches_stays_on_the_current_stream() -> None:
    summed, twice = Planned(cuda_relu_of_sum), Planned(cuda_twice)
    numel = 1 << 20
    value = torch.ones(numel, device="cuda")
    summed(value, 1.0), twice(value, 1.0)
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(2)]
    found: list[tuple[float, Tensor, Tensor]] = []
    for stream, number in zip(streams * 2, (2.0, 3.0, 4.0, 5.0), strict=True):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            values = torch.full((numel,), number, device="cuda")
            found.append((number, summed(values, 1.0), twice(values, 2.0)))
    torch.cuda.synchronize()
    for number, total, doubled in found:
        assert total.item() == number * numel
        assert bool((doubled == 4 * number).all())
    assert summed.runs == twice.runs == 1


@pytest.mark.gpu
def test_a_cuda_graph_fills_a_plans_workspace_with_zeros_in_every_replay() -> None:
    summed, twice = Planned(cuda_relu_of_sum), Planned(cuda_twice)
    value = torch.ones(1000, device="cuda")
    summed(value, 1.0), twice(value, 1.0)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total, doubled = summed(value, 2.0), twice(value, 2.0)
    torch.ones(1000, device="cuda").mul_(7.0)  # not in the graph's memory
    for number in (1.0, 5.0, 5.0):
        value.fill_(number)
        graph.replay()
        assert total.item() == 2000 * number
        assert bool((doubled == 4 * number).all())
    assert summed.runs == twice.runs == 1


@pytest.mark.gpu
def test_a_workspace_on_a_gpu_goes_back_and_may_be_reused_at_once() -> None:
    op, numel = Planned(cuda_twice), 1 << 22
    value = torch.ones(numel, device="cuda")
    op(value, 1.0)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(20_000_000)  # all below is enqueued before anything has run
    output = op(value, 3.0)
    assert torch.cuda.memory_allocated() - before == output.nbytes
    reserved = torch.cuda.memory_reserved()
    later = torch.full((numel,), -7.0, device="cuda")  # in the workspace's memory
    again = op(later, 1.0)
    assert torch.cuda.memory_reserved() - reserved <= 2 * output.nbytes
    assert bool((output == 9.0).all())
    assert bool((again == 0.0).all())
    assert bool((later == -7.0).all())
    assert op.runs == 1


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_gradients_of_several_launches_come_from_plans(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_launch(*args: Any) -> None:
        raise AssertionError("a launch that is not a plan's")

    generator = torch.Generator().manual_seed(1)
    low = torch.tensor([0.0, 0.0, 1.0, 1.0])  # sides of 1 to 2 where four columns are a box

    def drawn(*shape: int) -> Tensor:
        value = torch.rand(shape, generator=generator) + (low if shape[-1] == 4 else 0.0)
        return value.cuda().requires_grad_()

    biased, boxes = ((4096, 96), (96,)), ((128, 256, 4), (128, 256, 4))
    operators: list[tuple[Any, Any, tuple[Any, ...]]] = [
        (fuselab.ops.bias_activation, biased, ("silu",)),
        (fuselab.ops.padded_generalized_box_iou_loss, boxes, ()),
        (fuselab.ops.generalized_box_iou_loss, boxes, ("sum",)),
    ]
    for operator, shapes, rest in operators:
        for is_planned in (False, True, True):
            inputs = [drawn(*shape) for shape in shapes]
            with monkeypatch.context() as patch:
                if is_planned:
                    patch.setattr(kernel_launch, "launch_cuda", no_launch)
                output = operator(*inputs, *rest, implementation=implementation)
                upstream = torch.rand(output.shape, generator=generator).cuda() * 1000
                ours = torch.autograd.grad(output, inputs, upstream)
            plain = operator(*inputs, *rest, implementation="reference")
            torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-4)
            expected = torch.autograd.grad(plain, inputs, upstream)
            torch.testing.assert_close(ours, tuple(expected), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_a_cuda_plan_belongs_to_its_device() -> None:
    op = Planned(cuda_scaled_relu)
    for _ in range(2):
        for index in (1, 0):
            value = torch.full((100,), 1.0 + index, device=f"cuda:{index}")
            output = op(value, 2.0)
            assert output.device == value.device
            assert bool((output == 2.0 * (1 + index)).all())
            assert torch.cuda.current_device() == 0
    assert op.runs == 2


@pytest.mark.gpu
def test_a_launch_on_another_stream_keeps_no_plan() -> None:
    stream = torch.cuda.Stream()

    def aside(value: Tensor) -> Tensor:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            output = cuda_scaled_relu(value, 1.0)
        torch.cuda.current_stream().wait_stream(stream)
        return output

    op, value = Planned(aside), torch.ones(8, device="cuda")
    for _ in range(2):
        assert op(value).tolist() == [1.0] * 8
    assert op.runs == 2


@pytest.mark.gpu
def test_uninitialised_memory_is_filled_when_torch_is_asked_to() -> None:
    def writes_the_first(value: Tensor) -> Tensor:
        output = torch.empty_like(value)
        args = (value, output, i64(1), f32(1.0))
        CUDA.launch("scaled_relu<float>", (1, 1, 1), (32, 1, 1), args)
        return output

    op, value = Planned(writes_the_first), torch.ones(64, device="cuda")
    torch.use_deterministic_algorithms(True)
    try:
        op(value)
        assert bool(op(value)[1:].isnan().all())
    finally:
        torch.use_deterministic_algorithms(False)
    assert op.runs <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
def test_a_capture_that_fails_leaves_nothing_behind(implementation: str) -> None:
    """Before there is a plan and with one; eager calls and captures go on. It fails in Python: past
    an error of CUDA's torch itself does not capture again in the process."""

    def step(value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        output = fuselab.ops.bias_activation(value, bias, "silu", implementation=implementation)
        return output, *torch.autograd.grad(output, (value, bias), torch.ones_like(output))

    def operands(columns: int) -> tuple[Tensor, Tensor]:
        value = torch.randn(64, columns, device="cuda", requires_grad=True)
        return value, torch.randn(columns, device="cuda", requires_grad=True)

    step(*operands(56))  # loads the kernels, and leaves the plans of another shape
    value, bias = operands(40)
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            step(value, bias)
            raise ZeroDivisionError
        assert launch_recording.thread.recording is None
        assert torch.is_grad_enabled()
    expected = torch.nn.functional.silu(value + bias)
    gradients = torch.autograd.grad(expected.sum(), (value, bias))
    # What keeps a graph made on the default stream alive (the operands' AccumulateGrad) has the
    # backward wait for that stream, which breaks a capture.
    wanted = expected.detach(), *gradients
    del expected
    for _ in range(3):
        torch.testing.assert_close(step(value, bias), wanted, rtol=1e-4, atol=1e-4)
    graph, results = captured(lambda: step(value, bias), value.device)
    graph.replay()
    torch.testing.assert_close(results, wanted, rtol=1e-4, atol=1e-4)


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
