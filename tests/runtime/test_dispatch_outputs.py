"""Operators with several outputs: gradients, transforms, plans, choice, refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from add_rms_norm_operator import OP, add_rms_norm, gradient, reference
from torch import Tensor

import fuselab
from fuselab.errors import ContractError
from fuselab.op import FusedOp, Gradient, Implementation
from fuselab.runtime import autograd_node, launch_plans
from fuselab.runtime.registered import REGISTERED


def _inputs(*, grad: bool, rows: int = 5, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    return [
        torch.randn(shape, generator=generator, dtype=dtype).requires_grad_(grad)
        for shape in ((rows, 7), (rows, 7), (7,))
    ]


def _cpp(*args: Any) -> Any:
    return add_rms_norm(*args, implementation="cpp")


LOSSES: dict[str, Callable[[Sequence[Tensor]], Tensor]] = {
    "first": lambda outputs: (outputs[0] ** 2).sum(),
    "second": lambda outputs: (outputs[1] ** 3).sum(),
    "both": lambda outputs: (outputs[0] * outputs[1]).sum(),
}


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("implementation", ["auto", "cpp", "reference"])
def test_every_output_is_the_references(implementation: str) -> None:
    for _ in range(3):  # the later calls run a plan
        inputs = _inputs(grad=False)
        outputs = add_rms_norm(*inputs, implementation=implementation)
        assert isinstance(outputs, tuple)
        torch.testing.assert_close(outputs, reference(*inputs))
        assert outputs[2].dtype == torch.bool


@pytest.mark.usefixtures("launcher")
@pytest.mark.parametrize("implementation", ["auto", "cpp", "reference"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_backward_may_go_through_any_of_the_outputs(loss: str, implementation: str) -> None:
    for _ in range(3):
        inputs = _inputs(grad=True)
        outputs = add_rms_norm(*inputs, implementation=implementation)
        assert [output.requires_grad for output in outputs] == [True, True, False]
        wanted = {"allow_unused": True, "materialize_grads": True}
        ours = torch.autograd.grad(LOSSES[loss](outputs), inputs, **wanted)
        eager = torch.autograd.grad(LOSSES[loss](reference(*inputs)), inputs, **wanted)
        torch.testing.assert_close(ours, eager)


def test_the_values_are_those_computed_by_hand() -> None:
    input = torch.tensor([[1.0, 2.0]], requires_grad=True)
    residual, weight = torch.tensor([[2.0, 2.0]]), torch.tensor([1.0, 10.0])
    hidden, normed, large = _cpp(input, residual, weight, 0.0)
    root = 12.5**0.5
    torch.testing.assert_close(hidden, torch.tensor([[3.0, 4.0]]))
    torch.testing.assert_close(normed, torch.tensor([[3 / root, 40 / root]]))
    assert large.tolist() == [[True, True]]
    hidden.sum().backward(retain_graph=True)
    assert input.grad is not None and input.grad.tolist() == [[1.0, 1.0]]
    input.grad = None
    normed.sum().backward()
    product = (1 * 3 + 10 * 4) / 2 / 12.5
    expected = torch.tensor([[1 - 3 * product, 10 - 4 * product]]) / root
    torch.testing.assert_close(input.grad, expected)


def test_it_differentiates_twice_and_in_batches() -> None:
    inputs = _inputs(grad=True, rows=2)

    def differentiable(*args: Tensor) -> tuple[Tensor, ...]:
        return _cpp(*args)[:2]

    assert torch.autograd.gradcheck(differentiable, inputs, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(differentiable, inputs)


def test_compiled_it_is_one_graph() -> None:
    graphs = 0

    def count(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(_cpp, backend=count, fullgraph=True, dynamic=True)
    for rows in (5, 6):
        inputs = _inputs(grad=True, rows=rows)
        for loss in LOSSES.values():
            outputs, expected = compiled(*inputs), reference(*inputs)
            torch.testing.assert_close(outputs, expected)
            torch.testing.assert_close(
                torch.autograd.grad(loss(outputs), inputs, materialize_grads=True),
                torch.autograd.grad(loss(expected), inputs, materialize_grads=True),
            )
    assert graphs == 1


@pytest.mark.parametrize("loss", LOSSES)
def test_torch_func_gives_what_it_gives_for_the_reference(loss: str) -> None:
    inputs = _inputs(grad=False, rows=3)
    batch = [torch.stack([tensor, tensor * 2, tensor - 1]) for tensor in inputs]

    def of(function: Callable[..., Any]) -> Callable[..., Tensor]:
        return lambda *args: LOSSES[loss](function(*args))

    torch.testing.assert_close(torch.vmap(_cpp)(*batch), torch.vmap(reference)(*batch))
    for transform in (
        lambda function: torch.func.grad(function, (0, 1, 2))(*inputs),
        lambda function: torch.vmap(torch.func.grad(function, (0, 1, 2)))(*batch),
        lambda function: torch.vmap(torch.func.grad(function), (0, None, None))(
            batch[0], *inputs[1:]
        ),
    ):
        torch.testing.assert_close(transform(of(_cpp)), transform(of(reference)))


def test_forward_mode_is_the_references() -> None:
    inputs = tuple(_inputs(grad=False))
    tangents = tuple(map(torch.ones_like, inputs))

    def floating(*args: Tensor) -> tuple[Tensor, ...]:
        return add_rms_norm(*args)[:2]

    ours = torch.func.jvp(floating, inputs, tangents)
    torch.testing.assert_close(
        ours, torch.func.jvp(lambda *args: reference(*args)[:2], inputs, tangents)
    )


@pytest.mark.usefixtures("launcher")
def test_forward_and_backward_replay_plans() -> None:
    calls: list[str] = []
    cpp = OP.implementations["cpp"]

    def noted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            calls.append(name)
            return function(*args)

        return call

    implementation = replace(
        cpp, forward=noted("forward", cpp.forward), backward=noted("backward", cpp.backward)
    )
    function = fuselab.operator(
        replace(OP, name="severaltest::planned", implementations={"cpp": implementation})
    )
    assert launch_plans.is_started()
    for _ in range(4):
        inputs = _inputs(grad=True)
        outputs = function(*inputs, implementation="cpp")
        ours = torch.autograd.grad(LOSSES["both"](outputs), inputs)
        eager = torch.autograd.grad(LOSSES["both"](reference(*inputs)), inputs)
        torch.testing.assert_close(ours, eager)
        with torch.no_grad():
            again = function(*inputs, implementation="cpp")
            torch.testing.assert_close(again, reference(*inputs))
    assert calls == ["forward", "backward"]
    registration = REGISTERED["severaltest::planned"]
    assert launch_plans.count_plans(registration.forward_id) == 1
    assert launch_plans.count_plans(registration.backward_id) == 1


@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (2, 0, 4)])
def test_empty_tensors(shape: tuple[int, ...]) -> None:
    inputs = [torch.randn(size, requires_grad=True) for size in (shape, shape, shape[-1:])]
    outputs = _cpp(*inputs)
    assert [output.shape for output in outputs] == [torch.Size(shape)] * 3
    grads = torch.autograd.grad(LOSSES["both"](outputs), inputs)
    assert [grad.shape for grad in grads] == [tensor.shape for tensor in inputs]
    assert not grads[2].any()


def test_a_reference_may_return_one_tensor_twice_or_an_argument() -> None:
    def twice(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        doubled = input * 2
        return doubled, doubled, input

    def twice_gradient(
        needs: Sequence[bool], grad_output: Sequence[Tensor]
    ) -> tuple[Tensor | None, ...]:
        first, second, third = grad_output
        return (2 * (first + second) + third if needs[0] else None,)

    op = FusedOp(
        name="severaltest::twice",
        reference=twice,
        implementations={"cpp": Implementation("cpu", twice, twice_gradient)},
        cases=OP.cases,
        gradient=Gradient(lambda output, input: (), twice_gradient),
    )
    fuselab.operator(op)
    input = torch.ones(3, requires_grad=True)
    outputs = torch.ops.severaltest.twice(input, "reference")
    assert len({output.data_ptr() for output in (*outputs, input)}) == 4
    (grad,) = torch.autograd.grad(sum(outputs).sum(), input)
    assert grad.tolist() == [5.0] * 3


def test_the_raw_operators_take_and_return_single_tensors() -> None:
    schema = torch.ops.severaltest.add_rms_norm.default._schema
    assert [str(result.type) for result in schema.returns] == ["Tensor"] * 3
    backward = torch.ops.severaltest.add_rms_norm_backward.default._schema
    assert [argument.name for argument in backward.arguments[:4]] == [
        "needs",
        *(f"grad_output_{place}" for place in range(3)),
    ]


def test_the_default_costs_count_every_output() -> None:
    inputs = _inputs(grad=False, rows=4, dtype=torch.float32)
    size, row = 4 * 7 * 4, 7 * 4
    cost = OP.cost(*inputs, 1e-6)
    assert (cost.bytes_read, cost.bytes_written) == (2 * size + row, 2 * size + size // 4)
    assert OP.cost_backward is not None
    cost = OP.cost_backward(*inputs, 1e-6)
    # Two upstream gradients, hidden and weight; the mask has no gradient.
    assert (cost.bytes_read, cost.bytes_written) == (3 * size + row, 2 * size + row)


def _with(name: str, annotation: Any, **changes: Any) -> FusedOp:
    def function(input: Tensor) -> Any:
        return input * 2, input * 3

    function.__annotations__["return"] = annotation
    plain = Implementation("cpu", function)
    return FusedOp(
        **{
            "name": f"severaltest::{name}",
            "reference": function,
            "implementations": {"cpp": plain},
            "cases": OP.cases,
            **changes,
        }
    )


@pytest.mark.parametrize(
    "annotation",
    [tuple, tuple[Tensor], tuple[Tensor, ...], list[Tensor], tuple[Tensor, int], dict[str, Tensor]],
)
def test_other_results_are_refused(annotation: Any) -> None:
    with pytest.raises(ContractError, match=r"flat tuple of at least two"):
        fuselab.operator(_with("refused", annotation))


def test_a_call_that_returns_something_else_is_refused() -> None:
    one = fuselab.operator(_with("one", Tensor))
    with pytest.raises(ContractError, match=r"one tensor, .*a tuple of a Tensor, a Tensor"):
        one(torch.ones(2), implementation="cpp")
    three = fuselab.operator(_with("three", tuple[Tensor, Tensor, Tensor]))
    with pytest.raises(ContractError, match="3 tensors"):
        three(torch.ones(2), implementation="cpp")


def test_the_gradient_must_take_one_upstream_gradient_per_output() -> None:
    def of_one(needs: Sequence[bool], grad_output: Tensor, input: Tensor) -> tuple[Tensor]:
        return (grad_output,)

    refused = _with(
        "of_one",
        tuple[Tensor, Tensor],
        gradient=Gradient(lambda output, input: (input,), of_one),
    )
    with pytest.raises(ContractError, match=r"grad_output: Sequence\[Tensor\]"):
        fuselab.operator(refused)
    passed = Gradient(OP.gradient.save, gradient, passed=((0, 3),))
    with pytest.raises(ContractError, match=r"the pair \(0, 3\).* its 3 outputs"):
        fuselab.operator(replace(OP, name="severaltest::passed", gradient=passed))


def test_more_operators_are_compiled_than_dynamo_compiles_one_function() -> None:
    """``torch.compile(operator)`` compiles the public function, which all operators have."""
    args = _inputs(grad=False)
    for number in range(torch._dynamo.config.recompile_limit + 2):
        one = fuselab.operator(replace(OP, name=f"severaltest::compiled_{number}"))
        compiled = torch.compile(one, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(*args), reference(*args))


def test_another_number_of_outputs_is_another_operator() -> None:
    two = fuselab.operator(_with("redefined", tuple[Tensor, Tensor]))
    assert fuselab.operator(_with("redefined", tuple[Tensor, Tensor, Tensor])) is not two


@pytest.mark.gpu
def test_a_cuda_graph_holds_every_output() -> None:
    def forward(*args: Any) -> Any:
        return tuple(output.contiguous() for output in reference(*args))

    function = fuselab.operator(
        replace(
            OP,
            name="severaltest::on_a_gpu",
            implementations={"plain": Implementation("cuda", forward, gradient)},
        )
    )
    inputs = [tensor.detach().cuda().requires_grad_() for tensor in _inputs(grad=False)]

    def step() -> tuple[Tensor, ...]:
        outputs = function(*inputs, implementation="plain")
        return *outputs, *torch.autograd.grad(LOSSES["both"](outputs), inputs)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        inputs[0].mul_(3)
    graph.replay()
    expected = reference(*inputs)
    grads = torch.autograd.grad(LOSSES["both"](expected), inputs)
    torch.testing.assert_close(results, (*expected, *grads))


@pytest.mark.usefixtures("launcher")
def test_planned_outputs_share_one_node_in_cpp() -> None:
    assert autograd_node.start()
    for _ in range(3):
        inputs = _inputs(grad=True)
        hidden, normed, large = _cpp(*inputs)
    assert type(hidden.grad_fn).__name__ == "CppFunction"
    assert hidden.grad_fn is normed.grad_fn
    assert (hidden.output_nr, normed.output_nr) == (0, 1)
    assert large.grad_fn is None
    normed.detach().zero_()  # it is not saved
    normed.sum().backward(retain_graph=True)
    hidden.detach().zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        normed.sum().backward()


@pytest.mark.usefixtures("launcher")
def test_compiled_autograd_takes_planned_outputs() -> None:
    assert autograd_node.start()
    for loss in LOSSES.values():
        for _ in range(3):
            inputs = _inputs(grad=True)
            outputs = _cpp(*inputs)
        assert type(outputs[0].grad_fn).__name__ == "CppFunction"
        compiler = torch.compile(backend="aot_eager", fullgraph=True)
        with torch._dynamo.compiled_autograd._enable(compiler):
            loss(outputs).backward()
        wanted = torch.autograd.grad(loss(reference(*inputs)), inputs, materialize_grads=True)
        found = [torch.zeros_like(one) if one.grad is None else one.grad for one in inputs]
        torch.testing.assert_close(found, list(wanted))
