"""Launch plans on a GPU: streams, CUDA graphs, threads, workspaces, gradients."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from planned_operator import Planned
from torch import Tensor

import fuselab.ops
from fuselab.measure.cuda_graph import captured
from fuselab.runtime import kernel_launch, launch_recording
from fuselab.runtime.cpp_source import f32, i64
from fuselab.runtime.cuda_source import CudaSource

pytestmark = pytest.mark.usefixtures("launcher")


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
