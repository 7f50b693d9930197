"""The public function and raw operators: autograd, torch.func, compile, fakes, choice."""

from __future__ import annotations

import pickle
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tanh_operator import CALLS, backward, forward, inputs, make_op, reference, tanh_op
from torch import Tensor
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fuselab
from fuselab.errors import (
    ArgumentTypeError,
    BuildError,
    ContractError,
    DifferentiationError,
    UnsupportedError,
)
from fuselab.op import Case, FusedOp, Gradient, Implementation
from fuselab.runtime import fallback
from fuselab.runtime.dispatch import choose


@pytest.fixture(autouse=True)
def no_calls_yet() -> None:
    CALLS.clear()


def test_forward_and_backward_run_the_implementation() -> None:
    args = inputs(grad=True)
    output = tanh_op(*args, scale=0.5, power=2)
    torch.testing.assert_close(output, reference(*args, 0.5, 2))
    assert CALLS == ["forward"]
    upstream = torch.randn_like(output)
    actual = torch.autograd.grad(output, args, upstream)
    expected = torch.autograd.grad(reference(*args, 0.5, 2), args, upstream)
    torch.testing.assert_close(actual, expected)
    assert CALLS == ["forward", "backward"]


def test_gradients_only_where_needed() -> None:
    input, update, bias = inputs(grad=False)
    bias.requires_grad_()
    (grad,) = torch.autograd.grad(tanh_op(input, update, bias).sum(), [bias])
    (expected,) = torch.autograd.grad(reference(input, update, bias).sum(), [bias])
    torch.testing.assert_close(grad, expected)


def test_gradcheck_and_gradgradcheck() -> None:
    args = inputs(grad=True)
    assert torch.autograd.gradcheck(lambda *tensors: tanh_op(*tensors, 0.5, 2), args)
    assert torch.autograd.gradgradcheck(lambda *tensors: tanh_op(*tensors, 0.5, 2), args)


def test_torch_func() -> None:
    input, update, bias = inputs(grad=False)
    batch = torch.randn(5, 3, 4, dtype=torch.float64)

    def with_(function: Callable[..., Tensor]) -> list[Any]:
        def loss(input: Tensor, bias: Tensor) -> Tensor:
            return function(input, update, bias, 0.5, 2).sum()

        def penalty(input: Tensor) -> Tensor:
            return torch.func.grad(loss)(input, bias).square().sum()

        return [
            torch.func.grad(loss)(input, bias),
            torch.func.grad(penalty)(input),
            torch.func.vmap(loss, in_dims=(0, None))(batch, bias),
            torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), in_dims=(0, None))(batch, bias),
            torch.func.jvp(lambda value: loss(value, bias), (input,), (update,)),
            torch.func.jacfwd(lambda value: function(input, update, value))(bias),
        ]

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*performance drop.*")  # no vmap fallback
        torch.testing.assert_close(with_(tanh_op), with_(reference))


@pytest.mark.parametrize("grad", [False, True])
def test_compile_whole_and_dynamic_without_a_graph_per_scale(grad: bool) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda *args: tanh_op(*args) * 2, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    graphs = torch._dynamo.utils.counters["stats"]
    before = graphs["unique_graphs"]
    for rows, scale in ((3, 0.5), (4, 0.25), (7, 1.5), (9, -2.0)):
        args = inputs(grad=grad, rows=rows)
        output, expected = compiled(*args, scale), reference(*args, scale) * 2
        torch.testing.assert_close(output, expected)
        if grad:
            torch.testing.assert_close(
                torch.autograd.grad(output.sum(), args), torch.autograd.grad(expected.sum(), args)
            )
    assert graphs["unique_graphs"] - before == 1


def test_opcheck_of_the_raw_operators() -> None:
    args = inputs(grad=False)
    raw = torch.ops.dispatchtest
    opcheck(raw.tanh_op.default, (*args, 0.5, 2, "auto"))
    scale = torch.tensor(0.5, dtype=torch.float64)
    opcheck(raw.tanh_op.scalar_tensor, (*args, scale, 2, "auto"))
    needs = [True, False, True]
    opcheck(raw.tanh_op_backward.default, (needs, args[0], *args, 0.5, 2, "auto"))


def test_a_float_that_lies_on_the_device_is_not_read() -> None:
    """Of a meta tensor no value can be read; of a CUDA tensor reading breaks a captured graph."""
    input, update = (torch.empty(4, 3, device="meta", requires_grad=True) for _ in range(2))
    scale = torch.empty((), device="meta", dtype=torch.float64)
    with pytest.raises(RuntimeError, match="meta"):
        torch.ops.dispatchtest.tanh_op.default(input, update, None, scale, 2, "cpp")
    with torch.no_grad():
        assert tanh_op(input, update, None, scale, implementation="cpp").shape == (4, 3)
    tanh_op(input, update, None, scale, implementation="cpp").sum().backward()
    assert update.grad is not None and update.grad.shape == (4, 3)


class Overloads(TorchDispatchMode):
    """Notes what is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("device", "overload"), [("cpu", "default"), ("meta", "scalar_tensor")])
def test_a_float_that_lies_in_the_hosts_memory_is_read(device: str, overload: str) -> None:
    """Its copy to a GPU, as a tensor, could not be captured in a CUDA graph."""
    input, update = (torch.empty(4, 3, device="meta", requires_grad=True) for _ in range(2))
    with Overloads() as calls:
        scale = torch.empty((), device=device)
        tanh_op(input, update, None, scale, implementation="cpp")
    assert f"dispatchtest.tanh_op.{overload}" in calls.seen


def test_raw_operators_differentiate_or_refuse_but_never_drop_a_gradient() -> None:
    args = inputs(grad=True)
    grads = torch.autograd.grad(torch.ops.dispatchtest.tanh_op(*args, 0.5, 2, "auto").sum(), args)
    expected = torch.autograd.grad(reference(*args, 0.5, 2).sum(), args)
    torch.testing.assert_close(grads, expected)
    with torch.no_grad():
        assert not torch.ops.dispatchtest.tanh_op(*args, 0.5, 2, "auto").requires_grad
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    with pytest.raises(DifferentiationError, match="carries no gradient of 'scale'"):
        torch.ops.dispatchtest.tanh_op.scalar_tensor(*args, scale, 2, "auto")
    needs = [True, True, True]
    with pytest.raises(DifferentiationError, match="carries no gradient of 'grad_output'"):
        torch.ops.dispatchtest.tanh_op_backward(needs, args[0], *args, 0.5, 2, "auto")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.raises(DifferentiationError, match="carries no gradient of 'input'"):
            torch.ops.dispatchtest.tanh_op(dual, *args[1:], 0.5, 2, "auto")


class _Exported(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = torch.nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))

    def forward(self, input: Tensor, update: Tensor) -> Tensor:
        return tanh_op(input, update, self.bias, 0.5)


def test_an_exported_program_runs_and_trains() -> None:
    input, update, _ = inputs(grad=False)
    model = _Exported()
    exported = torch.export.export(model, (input, update)).run_decompositions().module()
    output = exported(input, update)
    torch.testing.assert_close(output, reference(input, update, model.bias, 0.5))
    (grad,) = torch.autograd.grad(output.sum(), exported.get_parameter("bias"))
    (expected,) = torch.autograd.grad(reference(input, update, model.bias, 0.5).sum(), model.bias)
    torch.testing.assert_close(grad, expected)


def test_vmap_over_no_samples_keeps_the_shape_of_one() -> None:
    output = torch.vmap(tanh_op, in_dims=(1, None))(torch.ones(3, 0, 2), torch.ones(3, 2))
    assert output.shape == (0, 3, 2)


def test_meta_tensors_run_forward_and_backward() -> None:
    softmax_input = torch.empty(3, 4, device="meta", requires_grad=True)
    fuselab.ops.softmax(softmax_input).sum().backward()
    assert softmax_input.grad is not None and softmax_input.grad.shape == (3, 4)


def test_public_functions_pickle_by_the_name_they_are_bound_to() -> None:
    for function in (tanh_op, fuselab.ops.softmax, fuselab.ops.add_mul_activation):
        assert pickle.loads(pickle.dumps(function)) is function


def test_the_reference_is_an_implementation() -> None:
    args = inputs(grad=True)
    output = tanh_op(*args, implementation="reference")
    torch.testing.assert_close(output, reference(*args))
    assert CALLS == []


def test_auto_takes_the_first_that_can_and_says_why_another_cannot() -> None:
    op = make_op(
        "dispatchtest::choosy",
        implementations={
            "triton": Implementation("cuda", forward, backward),
            "first": Implementation("cpu", forward, backward, lambda *args: "too small"),
            "second": Implementation("cpu", forward, backward),
        },
    )
    choosy = fuselab.operator(op)
    args = inputs(grad=False)
    assert choose(op, (*args, 1.0, 1)) == "second"
    with pytest.raises(UnsupportedError, match="'first' cannot run these inputs: too small"):
        choosy(*args, implementation="first")
    with pytest.raises(UnsupportedError, match="it runs on cuda, the inputs are on cpu"):
        choosy(*args, implementation="triton")


def test_a_failed_build_falls_back_once_and_is_a_failure_where_it_counts() -> None:
    def broken(*args: Any) -> Tensor:
        raise BuildError("no compiler")

    op = make_op(
        "dispatchtest::broken", implementations={"cpp": Implementation("cpu", broken, backward)}
    )
    function = fuselab.operator(op)
    args = inputs(grad=False)
    with fallback.strict(), pytest.raises(BuildError, match="no compiler"):
        function(*args)
    with pytest.warns(fallback.FallbackWarning, match="no compiler") as caught:
        for _ in range(3):
            torch.testing.assert_close(function(*args), reference(*args))
    assert len(caught) == 1


def test_threads_that_register_at_once_get_one_function() -> None:
    op = make_op("test::by_threads")
    start = threading.Barrier(8)

    def register(_: int) -> Callable[..., Tensor]:
        start.wait()
        return fuselab.operator(op)

    with ThreadPoolExecutor(8) as threads:
        assert len(set(threads.map(register, range(8)))) == 1


def test_registering_again_replaces_an_operator_with_the_same_reference() -> None:
    op = make_op("dispatchtest::again")
    function = fuselab.operator(op)
    assert fuselab.operator(op) is function
    doubled = make_op(
        "dispatchtest::again",
        implementations={"cpp": Implementation("cpu", lambda *args: reference(*args) * 2)},
    )
    assert fuselab.operator(doubled) is function
    args = inputs(grad=False)
    torch.testing.assert_close(function(*args), reference(*args) * 2)


def multiplied(by: float) -> FusedOp:
    def reference(input: Tensor) -> Tensor:
        return input * by

    return make_op(
        "dispatchtest::multiplied", reference=reference, gradient=None, implementations={}
    )


def tripled(input: Tensor, times: int = 1) -> Tensor:
    return input * 3 * times


def test_another_operator_of_the_same_name_is_registered_beside_the_first() -> None:
    """Each function goes on computing what it was made from, whatever else has its name."""
    input = torch.tensor([1.0, -2.0])
    ops = [
        multiplied(2.0),
        make_op("dispatchtest::multiplied", reference=tripled, gradient=None, implementations={}),
        multiplied(5.0),
    ]
    functions = [fuselab.operator(op) for op in ops]
    assert [function(input).tolist() for function in functions] == [[2, -4], [3, -6], [5, -10]]
    assert [fuselab.operator(op) for op in ops] == functions
    compiled = torch.compile(lambda x: [one(x) for one in functions], backend="eager")
    assert [one.tolist() for one in compiled(input)] == [[2, -4], [3, -6], [5, -10]]
    assert torch.ops.dispatchtest.multiplied(input, "auto").tolist() == [2, -4]
    assert torch.ops.dispatchtest.multiplied__2(input, 1, "auto").tolist() == [3, -6]
    assert torch.ops.dispatchtest.multiplied__3(input, "auto").tolist() == [5, -10]
    with pytest.raises(ArgumentTypeError, match="multiplied: 'input' must be a Tensor"):
        functions[1](1.0)


@pytest.mark.parametrize(
    ("returned", "said"),
    [(lambda grad: (grad, grad), "returns 2;"), (lambda grad: grad, "returns Tensor;")],
    ids=["two", "one"],
)
def test_a_backward_returns_one_gradient_per_tensor(
    returned: Callable[[Tensor], Any], said: str
) -> None:
    def too_few(needs: Any, grad_output: Tensor, *saved: Any) -> Any:
        return returned(grad_output)

    implementations = {"cpp": Implementation("cpu", forward, too_few)}
    function = fuselab.operator(
        make_op(f"dispatchtest::too_few_{len(said)}", implementations=implementations)
    )
    args = inputs(grad=True)
    with pytest.raises(ContractError, match=f"cpp {said} it returns a tuple of 3, one gradient"):
        torch.autograd.grad(function(*args).sum(), args)


def test_an_alias_of_an_input_leaves_as_a_copy() -> None:
    def identity(input: Tensor) -> Tensor:
        return input

    function = fuselab.operator(
        make_op("dispatchtest::identity", reference=identity, gradient=None, implementations={})
    )
    input = torch.randn(3)
    raw = torch.ops.dispatchtest.identity(input, "auto")
    assert raw.data_ptr() != input.data_ptr()
    torch.testing.assert_close(function(input), input)


def test_what_an_implementation_returns_of_its_arguments_leaves_as_a_copy() -> None:
    """The gradient of a bias of one row is the upstream gradient, also where it is differentiated
    again."""

    def first(input: Tensor, *others: Any) -> Tensor:
        return input

    def upstream(needs: Any, grad_output: Tensor, *saved: Any) -> tuple[Tensor | None, ...]:
        return grad_output.view(-1), None, None

    function = fuselab.operator(
        make_op(
            "dispatchtest::returns_arguments",
            implementations={"plain": Implementation("cpu", first, upstream)},
        )
    )
    input, given = torch.randn(3, requires_grad=True), torch.randn(3)
    output = function(input, torch.ones(3), implementation="plain")
    assert output.data_ptr() != input.data_ptr() and torch.equal(output, input)
    (grad,) = torch.autograd.grad(output, input, given, create_graph=True)
    assert grad.data_ptr() != given.data_ptr() and torch.equal(grad, given)
    assert grad.requires_grad


def test_autocast_arguments_come_from_the_contract() -> None:
    op = make_op(
        "dispatchtest::autocasts",
        autocast=lambda dtype, *args: tuple(
            value.float() if isinstance(value, Tensor) else value for value in args
        ),
    )
    function = fuselab.operator(op)
    args = inputs(grad=False, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*args).dtype == torch.float32
    assert function(*args).dtype == torch.bfloat16


def product(one: Tensor, other: Tensor) -> Tensor:
    return one @ other


def product_gradient(
    needs: Sequence[bool], grad_output: Tensor, one: Tensor, other: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    return torch.mm(grad_output, other.T), torch.mm(one.T, grad_output)


def test_an_implementation_does_not_run_under_autocast() -> None:
    """``FusedOp.autocast`` has cast the arguments; a product between launches must not cast again,
    in the forward or in a backward that runs within autocast."""
    op = FusedOp(
        "dispatchtest::product",
        product,
        {"plain": Implementation("cpu", torch.mm, product_gradient)},
        cases=[Case.normal([(2, 3), (3, 4)])],
        gradient=Gradient(lambda output, one, other: (one, other), product_gradient),
    )
    function = fuselab.operator(op)
    one, other = torch.full((2, 3), 1 + 2.0**-12), torch.ones(3, 4)
    leaves = one.requires_grad_(), other.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = function(*leaves, implementation="plain")
        grads = torch.autograd.grad(output, leaves, torch.full((2, 4), 1 + 2.0**-12))
    assert output.dtype == torch.float32
    assert output.tolist() == [[3 + 3 * 2.0**-12] * 4] * 2
    assert [grad.dtype for grad in grads] == [torch.float32] * 2
    assert grads[0].tolist() == [[4 + 4 * 2.0**-12] * 3] * 2


def test_a_tensor_that_outlived_its_torch_func_transform_has_a_gradient() -> None:
    leaked = []

    def leak(value: Tensor) -> Tensor:
        leaked.append(value * 1)
        return value.sum()

    input, update, bias = inputs(grad=False)
    torch.func.grad(leak)(input)
    bias.requires_grad_()
    (grad,) = torch.autograd.grad(tanh_op(leaked[0], update, bias).sum(), [bias])
    (expected,) = torch.autograd.grad(reference(input, update, bias).sum(), [bias])
    torch.testing.assert_close(grad, expected)
