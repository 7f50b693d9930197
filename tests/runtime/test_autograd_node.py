"""Gradients from launch plans: autograd's C++ node behaves as the autograd.Function it replaces."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from test_dispatch_plans import SOURCE, make
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fuselab.errors import DifferentiationError, LaunchError
from fuselab.op import Gradient, Implementation
from fuselab.runtime import autograd_node, launch_plans
from fuselab.runtime.cpp_source import f32, i64
from fuselab.runtime.dispatch import operator

Function = Callable[..., Tensor]


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    assert launch_plans.start()
    assert autograd_node.attach() is not None


class Backwards:
    """A backward of relu(scale input) that launches, and notes what was asked of it."""

    def __init__(self) -> None:
        self.asked: list[tuple[bool, ...]] = []
        self.fails = False

    def __call__(
        self, needs: tuple[bool, ...], grad: Tensor, output: Tensor, scale: float
    ) -> tuple[Tensor | None, ...]:
        self.asked.append(tuple(needs))
        if self.fails:
            raise LaunchError("the backward's own words")
        result = torch.empty_like(output)
        grad = grad.contiguous()  # a copy for that of sum(): no plan, the way past it
        # For outputs and upstream gradients of ones: relu(scale * grad).
        args = (grad, result, i64(grad.numel()), f32(scale))
        SOURCE.launch("scaled_relu<float, float>", args)
        return (result,)


@pytest.fixture
def planned() -> Iterator[tuple[Function, Backwards]]:
    """An operator whose forward has a plan for three float32 numbers."""
    op, counted = make()
    backward = Backwards()
    declared = Implementation("cpu", counted.forward, backward)
    op, _ = make(implementations={"cpp": declared})
    function = operator(op)
    function(torch.ones(3), 2.0)
    assert not has_node(function(leaf(1.0, 2.0, 3.0), 2.0))  # the kind's first with a gradient
    yield function, backward


def has_node(output: Tensor) -> bool:
    """The Function's node is a Python class of its own name."""
    assert output.grad_fn is not None
    return type(output.grad_fn).__name__ == "CppFunction"


def leaf(*numbers: float) -> Tensor:
    return torch.tensor(numbers, requires_grad=True)


def test_a_planned_call_gets_the_node_and_the_gradient(planned: Any) -> None:
    function, backward = planned
    for scale in (2.0, 3.0, 0.5):
        value = leaf(1.0, 2.0, 3.0)
        output = function(value, scale)
        assert has_node(output)
        assert output.requires_grad
        assert not output.is_leaf
        assert output.grad_fn.name().endswith("_autograd")
        assert output.tolist() == [scale, 2 * scale, 3 * scale]
        output.backward(torch.tensor([1.0, 10.0, 100.0]))
        assert value.grad is not None
        assert value.grad.tolist() == [scale, 10 * scale, 100 * scale]
    assert backward.asked == [(True,)]  # the other two came from its plan


def test_the_node_is_a_part_of_a_longer_graph(planned: Any) -> None:
    function, _ = planned
    value, other = leaf(1.0, 2.0, 3.0), leaf(1.0, 1.0, 1.0)
    output = function(function(value * 2, 2.0) + other, 3.0)
    grads = torch.autograd.grad(output.sum(), (value, other))
    assert grads[0].tolist() == [12.0] * 3
    assert grads[1].tolist() == [3.0] * 3
    long = value
    for _ in range(20_000):  # freed without recursion
        long = function(long, 1.0)
    long.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [1.0] * 3


def test_a_call_that_needs_no_gradient_gets_no_node(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where another thread records the plan between the call's two looks for one."""
    function, _ = planned
    looks: list[bool] = []

    def late(*args: Any) -> Any:
        looks.append(True)
        return None if len(looks) == 1 else lookup(*args)

    lookup = launch_plans.lookup
    monkeypatch.setattr(launch_plans, "lookup", late)
    output = function(torch.tensor([1.0, 2.0, 3.0]), 2.0)
    assert len(looks) == 2
    assert output.tolist() == [2.0, 4.0, 6.0]
    assert not output.requires_grad


def test_two_backwards_with_retain_graph_and_none_without(planned: Any) -> None:
    function, _ = planned
    value = leaf(1.0, 2.0, 3.0)
    output = function(value, 2.0).sum()
    output.backward(retain_graph=True)
    output.backward()
    assert value.grad is not None
    assert value.grad.tolist() == [4.0] * 3
    with pytest.raises(RuntimeError, match="second time"):
        output.backward()


def test_second_derivatives_come_from_the_reference_gradient(planned: Any) -> None:
    function, _ = planned
    value, upstream = leaf(1.0, 2.0, 3.0), leaf(1.0, 2.0, 3.0)
    output = function(value, 2.0)
    assert has_node(output)
    (grad,) = torch.autograd.grad(output, value, upstream, create_graph=True)
    assert grad.tolist() == [2.0, 4.0, 6.0]
    (second,) = torch.autograd.grad(grad.sum(), upstream)
    assert second.tolist() == [2.0] * 3


def test_a_tensor_changed_since_the_forward_is_noticed(planned: Any) -> None:
    function, _ = planned
    output = function(leaf(1.0, 2.0, 3.0), 2.0)
    with torch.no_grad():
        output.mul_(2.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_saved_output_does_not_keep_itself_alive(planned: Any) -> None:
    function, _ = planned
    gc.collect()
    gc.disable()
    try:
        output = function(leaf(1.0, 2.0, 3.0), 2.0)
        alive = weakref.ref(output)
        del output
        assert alive() is None
    finally:
        gc.enable()


def gradient_of_sequence(
    needs: Sequence[bool], grad_output: Tensor, kept: Sequence[Tensor], scale: float
) -> tuple[Tensor | None, ...]:
    return (grad_output * scale * (kept[0] > 0),)


def test_a_saved_sequence_of_tensors_is_watched_and_freed() -> None:
    op, _ = make(
        gradient=Gradient(
            save=lambda output, input, scale: ((output, input), scale),
            reference=gradient_of_sequence,
        )
    )
    function = operator(op)
    function(torch.ones(3), 2.0)
    function(leaf(1.0, 2.0, 3.0), 2.0)
    value = leaf(1.0, 2.0, 3.0)
    output = function(value, 2.0)
    output.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0] * 3
    alive = weakref.ref(output)
    del output
    gc.collect()
    assert alive() is None
    output = function(value, 2.0)
    with torch.no_grad():
        output.mul_(-1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


@pytest.mark.parametrize("from_plan", [False, True])
def test_a_graph_outlives_the_implementation_that_made_it(from_plan: bool) -> None:
    op, _ = make()
    function, value = operator(op), leaf(1.0, 2.0, 3.0)
    if from_plan:
        function(value.detach(), 2.0, implementation="cpp")
        function(value, 2.0, implementation="cpp")
    output = function(value, 2.0, implementation="cpp")
    assert has_node(output) == from_plan
    operator(make(name=op.name, implementations={})[0])
    output.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0] * 3


def test_hooks_on_saved_tensors_and_checkpoints(planned: Any) -> None:
    function, _ = planned
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    value = leaf(1.0, 2.0, 3.0)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: packed[place]):
        output = function(value, 2.0)
    output.sum().backward()
    assert [tensor.tolist() for tensor in packed] == [[2.0, 4.0, 6.0]]
    assert value.grad is not None
    assert value.grad.tolist() == [2.0] * 3
    again = leaf(1.0, 2.0, 3.0)
    result = checkpoint(lambda x: function(function(x, 2.0), 2.0), again, use_reentrant=False)
    result.sum().backward()
    assert again.grad is not None
    assert again.grad.tolist() == [4.0] * 3


def test_a_hook_that_raises_and_a_backward_that_raises_keep_their_types(planned: Any) -> None:
    function, backward = planned

    def refuse(tensor: Tensor) -> None:
        raise ZeroDivisionError("packing")

    value = leaf(1.0, 2.0, 3.0)
    with (
        torch.autograd.graph.saved_tensors_hooks(refuse, lambda kept: kept),
        pytest.raises(ZeroDivisionError, match="packing"),
    ):
        function(value, 2.0)
    assert torch.is_grad_enabled()
    backward.fails = True
    with pytest.raises(LaunchError, match="own words"):
        function(value, 2.0).sum().backward()


def test_only_the_gradients_that_are_asked_for_are_computed() -> None:
    asked = []

    def both(needs: tuple[bool, ...], grad: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        asked.append(tuple(needs))
        return tuple(torch.empty_like(grad).copy_(grad) if need else None for need in needs)

    def forward(input: Tensor, other: Tensor) -> Tensor:
        output = torch.empty_like(input)
        SOURCE.launch("add<float>", (input, other, output, i64(input.numel())))
        return output

    def reference(input: Tensor, other: Tensor) -> Tensor:
        return input + other

    def reference_gradient(needs: Any, grad_output: Any) -> Any:
        return tuple(grad_output if need else None for need in needs)

    reference_gradient.__annotations__ = {"needs": "Sequence[bool]", "grad_output": "Tensor"}
    from collections.abc import Sequence

    reference_gradient.__globals__["Sequence"] = Sequence
    op, _ = make(
        reference=reference,
        implementations={"cpp": Implementation("cpu", forward, both)},
        gradient=Gradient(save=lambda output, *args: (), reference=reference_gradient),
    )
    function = operator(op)
    function(torch.ones(3), torch.ones(3))
    left, right = leaf(1.0, 2.0, 3.0), leaf(1.0, 2.0, 3.0)
    function(left, right.detach()).sum().backward()
    torch.autograd.grad(function(left, right).sum(), right)
    output = function(left, right).sum()
    assert has_node(function(left, right))
    output.backward()
    assert asked == [(True, False), (False, True), (True, True)]
    with pytest.raises(RuntimeError, match="second time"):  # though nothing was saved
        output.backward()


def upstream_twice(needs: Sequence[bool], grad_output: Tensor) -> tuple[Tensor | None, ...]:
    upstream_twice.asked += 1
    return grad_output if needs[0] else None, grad_output if needs[1] else None


upstream_twice.asked = 0


@pytest.fixture
def sum_without_backward() -> Function:
    """A sum whose forward launches, and whose gradient is the contract's formula alone."""

    def forward(input: Tensor, other: Tensor) -> Tensor:
        output = torch.empty_like(input)
        SOURCE.launch("add<float>", (input, other, output, i64(input.numel())))
        return output

    def reference(input: Tensor, other: Tensor) -> Tensor:
        return input + other

    op, _ = make(
        reference=reference,
        implementations={"cpp": Implementation("cpu", forward)},
        gradient=Gradient(save=lambda output, *args: (), reference=upstream_twice),
    )
    upstream_twice.asked = 0
    return operator(op)


def test_a_gradient_that_no_implementation_has_is_the_formulas_without_a_copy(
    sum_without_backward: Function,
) -> None:
    function, upstream = sum_without_backward, torch.tensor([1.0, 2.0, 3.0])
    left, right = leaf(1.0, 2.0, 3.0), leaf(4.0, 5.0, 6.0)
    for kind in ("the Function", "the node", "the node with what is known"):
        output = function(left, right)
        assert output.tolist() == [5.0, 7.0, 9.0]
        grads = torch.autograd.grad(output, (left, right), upstream)
        assert [grad.data_ptr() for grad in grads] == [upstream.data_ptr()] * 2, kind
    assert upstream_twice.asked == 3
    (only,) = torch.autograd.grad(function(left, right.detach()), left, upstream)
    assert only.tolist() == [1.0, 2.0, 3.0]
    # Accumulated, they are apart from each other and from the upstream one.
    function(left, right).backward(upstream)
    assert left.grad is not None and right.grad is not None
    left.grad.mul_(10)
    assert right.grad.tolist() == upstream.tolist() == [1.0, 2.0, 3.0]
    # A raw operator's are tensors of their own, and so are those that are differentiated again.
    raw = getattr(torch.ops.runtime_tests, function.__name__ + "_backward")
    for _ in range(2):
        results = raw([True, True], upstream, "auto")
        assert [result.tolist() for result in results] == [[1.0, 2.0, 3.0]] * 2
        assert len({tensor.data_ptr() for tensor in (upstream, *results)}) == 3
    wanted = upstream.clone().requires_grad_()
    grads = torch.autograd.grad(function(left, right), (left, right), wanted, create_graph=True)
    (second,) = torch.autograd.grad(grads[0].sum() + 2 * grads[1].sum(), wanted)
    assert second.tolist() == [3.0] * 3
    compiled = torch.compile(function, backend="aot_eager")
    grads = torch.autograd.grad(compiled(left, right), (left, right), upstream)
    assert [grad.tolist() for grad in grads] == [[1.0, 2.0, 3.0]] * 2


def compiled_backward(backend: str = "eager") -> Any:
    return torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_autograd_takes_the_node_into_its_graph(planned: Any, backend: str) -> None:
    function, _ = planned
    torch._dynamo.reset()
    for scale in (2.0, 2.0, 5.0):
        for upstream in ([1.0, 1.0, 1.0], [1.0, 10.0, 100.0]):
            value = leaf(1.0, 2.0, 3.0)
            output = function(function(value * 2, scale), 3.0)
            assert has_node(output)
            with compiled_backward(backend):
                (output * torch.tensor(upstream)).sum().backward()
            assert value.grad is not None
            assert value.grad.tolist() == [6 * scale * number for number in upstream]
    value = leaf(1.0, 2.0, 3.0)
    output = function(value, 2.0).sum()
    with compiled_backward(backend):
        output.backward(retain_graph=True)
        output.backward()
        assert value.grad is not None
        assert value.grad.tolist() == [4.0] * 3
        with pytest.raises(RuntimeError, match="second time"):
            output.backward()


def test_compiled_autograd_computes_the_gradients_that_are_asked_for(
    sum_without_backward: Function,
) -> None:
    function, upstream = sum_without_backward, torch.tensor([1.0, 2.0, 3.0])
    torch._dynamo.reset()
    left, right = leaf(1.0, 2.0, 3.0), leaf(1.0, 2.0, 3.0)
    function(left, right), function(left, right.detach())
    for _ in range(2):
        output = function(left, right)
        assert has_node(output)
        with compiled_backward():
            (only,) = torch.autograd.grad(output * 2, right, upstream, retain_graph=True)
            both = torch.autograd.grad(output * 2, (left, right), upstream)
            left.grad = right.grad = None
            function(left, right.detach()).backward(upstream)
        assert left.grad is not None
        assert right.grad is None
        for grad, wanted in ((only, 2.0), (both[0], 2.0), (both[1], 2.0), (left.grad, 1.0)):
            assert grad.tolist() == [wanted, 2 * wanted, 3 * wanted]


def test_a_compiled_step_with_its_backward(planned: Any) -> None:
    import fuselab.ops

    value, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    torch._dynamo.reset()

    @torch.compile(backend="aot_eager")
    def step(value: Tensor, bias: Tensor) -> None:
        fuselab.ops.bias_activation(value, bias, "relu").sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step(value, bias)
    wanted = torch.autograd.grad(torch.relu(value + bias).sum(), (value, bias))
    for ours, theirs in zip((value.grad, bias.grad), wanted, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_no_grad_and_inference_mode_give_outputs_without_a_node(planned: Any) -> None:
    function, _ = planned
    value = leaf(1.0, 2.0, 3.0)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            assert function(value, 2.0).grad_fn is None
            assert function(torch.ones(7, requires_grad=True), 2.0).grad_fn is None  # no plan yet
            assert not torch.is_grad_enabled()
    assert function(value, 2.0).grad_fn is not None


def test_a_float_that_needs_a_gradient_is_refused_past_a_plan_too() -> None:
    def forward(input: Tensor, scale: Any) -> Tensor:
        output = torch.empty_like(input)
        SOURCE.launch("add<float>", (input, input, output, i64(input.numel())))
        return output

    op, _ = make(implementations={"cpp": Implementation("cpu", forward)})
    function = operator(op)
    scale = torch.tensor(2.0)
    for _ in range(2):
        assert function(torch.ones(3), scale).tolist() == [2.0] * 3
    with pytest.raises(DifferentiationError, match="'scale' has no gradient"):
        function(torch.ones(3), scale.clone().requires_grad_())


def test_a_function_mode_sees_no_more_than_before(planned: Any) -> None:
    function, _ = planned
    seen: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(getattr(func, "__name__", str(func)))
            return func(*args, **(kwargs or {}))

    value = leaf(1.0, 2.0, 3.0)
    with Watch():
        output = function(value, 2.0)
    assert "_set_grad_enabled" not in seen
    assert not has_node(output)


def test_functorch_does_not_meet_the_node(planned: Any) -> None:
    function, _ = planned
    value = torch.tensor([1.0, 2.0, 3.0])
    grads = torch.func.grad(lambda x: function(x, 2.0).sum())(value)
    assert grads.tolist() == [2.0] * 3


def test_backwards_in_many_threads(planned: Any) -> None:
    function, _ = planned
    wrong: list[float] = []

    def work(scale: float) -> None:
        for _ in range(200):
            value = leaf(1.0, 2.0, 3.0)
            function(function(value, scale), 2.0).sum().backward()
            if value.grad is None or value.grad.tolist() != [2 * scale] * 3:
                wrong.append(scale)

    threads = [threading.Thread(target=work, args=(scale,)) for scale in (1.0, 2.0, 4.0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_without_the_node_the_function_is_taken(
    planned: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    function, _ = planned
    monkeypatch.setattr(autograd_node, "_attach", None)
    value = leaf(1.0, 2.0, 3.0)
    output = function(value, 2.0)
    assert not has_node(output)
    output.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0] * 3


@pytest.mark.gpu
def test_on_a_gpu_gradients_follow_the_stream_of_the_forward_and_graphs() -> None:
    import fuselab.ops

    def step(value: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        output = fuselab.ops.bias_activation(value, bias, "relu")
        return torch.autograd.grad(output, (value, bias), torch.ones_like(output))

    value = torch.ones(64, 32, device="cuda", requires_grad=True)
    bias = torch.ones(32, device="cuda", requires_grad=True)
    step(value, bias), step(value, bias)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        changed = torch.full((64, 32), -2.0, device="cuda").requires_grad_()
        grads = step(changed, bias)
    stream.synchronize()
    assert bool((grads[0] == 0).all())
    assert bool((grads[1] == 0).all())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(value, bias)
    for number in (1.0, -5.0, 2.0):
        with torch.no_grad():
            value.fill_(number)
        graph.replay()
        assert bool((captured[0] == (number > 0)).all())
        assert bool((captured[1] == 64 * (number > 0)).all())
