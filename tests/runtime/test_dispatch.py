"""The public function and raw operators: autograd, torch.func, compile, fakes, choice, refusals."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import opcheck
from torch.utils._python_dispatch import TorchDispatchMode

import fuselab
from fuselab.errors import (
    ArgumentError,
    BuildError,
    ContractError,
    DeviceError,
    DifferentiationError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import fallback
from fuselab.runtime.dispatch import choose


def reference(
    input: Tensor, update: Tensor, bias: Tensor | None = None, scale: float = 1.0, power: int = 1
) -> Tensor:
    """tanh(input + scale * update + bias) ** power."""
    total = input + scale * update
    if bias is not None:
        total = total + bias
    return torch.tanh(total) ** power


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    update: Tensor,
    bias: Tensor | None,
    scale: float,
    power: int,
) -> tuple[Tensor | None, ...]:
    value = torch.tanh(input + scale * update + (0 if bias is None else bias))
    grad = grad_output * power * value ** (power - 1) * (1 - value * value)
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        grad if needs[0] else None,
        grad * scale if needs[1] else None,
        rows.sum(0) if needs[2] else None,
    )


CALLS: list[str] = []


def forward(*args: Any) -> Tensor:
    CALLS.append("forward")
    return reference(*args)


def backward(*args: Any) -> tuple[Tensor | None, ...]:
    CALLS.append("backward")
    return gradient(*args)


def make_op(name: str, **changes: Any) -> FusedOp:
    fields: dict[str, Any] = {
        "reference": reference,
        "implementations": {"cpp": Implementation("cpu", forward, backward)},
        "cost": lambda *args: Cost(1, 1, 1),
        "cases": [Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),) * 2))],
        "gradient": Gradient(save=lambda output, *args: args, reference=gradient),
    }
    return FusedOp(name=name, **{**fields, **changes})


tanh_op = fuselab.operator(make_op("dispatchtest::tanh_op"))


@pytest.fixture(autouse=True)
def _no_calls_yet() -> None:
    CALLS.clear()


def _inputs(*, grad: bool, dtype: torch.dtype = torch.float64, rows: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 4), (rows, 4), (4,))
    return [
        torch.randn(shape, dtype=dtype, generator=generator).requires_grad_(grad)
        for shape in shapes
    ]


def test_forward_and_backward_run_the_implementation() -> None:
    args = _inputs(grad=True)
    output = tanh_op(*args, scale=0.5, power=2)
    torch.testing.assert_close(output, reference(*args, 0.5, 2))
    assert CALLS == ["forward"]
    upstream = torch.randn_like(output)
    actual = torch.autograd.grad(output, args, upstream)
    expected = torch.autograd.grad(reference(*args, 0.5, 2), args, upstream)
    torch.testing.assert_close(actual, expected)
    assert CALLS == ["forward", "backward"]


def test_gradients_only_where_needed() -> None:
    input, update, bias = _inputs(grad=False)
    bias.requires_grad_()
    (grad,) = torch.autograd.grad(tanh_op(input, update, bias).sum(), [bias])
    (expected,) = torch.autograd.grad(reference(input, update, bias).sum(), [bias])
    torch.testing.assert_close(grad, expected)


def test_gradcheck_and_gradgradcheck() -> None:
    args = _inputs(grad=True)
    assert torch.autograd.gradcheck(lambda *tensors: tanh_op(*tensors, 0.5, 2), args)
    assert torch.autograd.gradgradcheck(lambda *tensors: tanh_op(*tensors, 0.5, 2), args)


def test_torch_func() -> None:
    input, update, bias = _inputs(grad=False)
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
        args = _inputs(grad=grad, rows=rows)
        output, expected = compiled(*args, scale), reference(*args, scale) * 2
        torch.testing.assert_close(output, expected)
        if grad:
            torch.testing.assert_close(
                torch.autograd.grad(output.sum(), args), torch.autograd.grad(expected.sum(), args)
            )
    assert graphs["unique_graphs"] - before == 1


def test_opcheck_of_the_raw_operators() -> None:
    args = _inputs(grad=False)
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
    args = _inputs(grad=True)
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
    input, update, _ = _inputs(grad=False)
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


def test_an_operator_without_gradient_refuses_one() -> None:
    plain = fuselab.operator(make_op("dispatchtest::plain", gradient=None))
    args = _inputs(grad=True)
    with pytest.raises(DifferentiationError, match="defines no gradient"):
        plain(*args)
    torch.testing.assert_close(plain(*(arg.detach() for arg in args)), reference(*args).detach())


def test_the_reference_is_an_implementation() -> None:
    args = _inputs(grad=True)
    output = tanh_op(*args, implementation="reference")
    torch.testing.assert_close(output, reference(*args))
    assert CALLS == []


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda a, b: tanh_op(a, b, implementation="cude"), UnknownNameError, "auto, cpp"),
        (lambda a, b: tanh_op(a, b, implementation=None), UnknownNameError, "auto, cpp"),
        (lambda a, b: tanh_op(a, b, None, "1"), ArgumentError, "'scale' must be a number, got str"),
        (lambda a, b: tanh_op(a, b, None, 1.0, 2.0), ArgumentError, "'power' must be an int"),
        (lambda a, b: tanh_op(a, b, 1.0), ArgumentError, "'bias' must be a Tensor or None"),
        (lambda a, b: tanh_op(a, b, None, torch.ones(3)), ArgumentError, "Tensor of shape \\(3,"),
        (
            lambda a, b: tanh_op(a, b, None, torch.ones((), requires_grad=True)),
            DifferentiationError,
            "'scale' has no gradient",
        ),
        (lambda a, b: tanh_op(a.to_sparse(), b), ArgumentError, "layout torch.sparse_coo"),
        (lambda a, b: tanh_op(3, b), ArgumentError, "'input' must be a Tensor, got int"),
        (lambda a, b: tanh_op(a), ArgumentError, "'update' is missing"),
        (lambda a, b: tanh_op(a, b, None, 1.0, 1, 2), ArgumentError, "takes 5 arguments, got 6"),
        (lambda a, b: tanh_op(a, b, scael=2.0), ArgumentError, "unexpected argument 'scael'"),
        (lambda a, b: tanh_op(a, b.to("meta")), DeviceError, "'update' is on meta"),
    ],
)
def test_wrong_calls_name_the_argument(
    call: Callable[..., Any], error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        call(torch.ones(2, 2), torch.ones(2, 2))


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
    args = _inputs(grad=False)
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
    args = _inputs(grad=False)
    with fallback.strict(), pytest.raises(BuildError, match="no compiler"):
        function(*args)
    with pytest.warns(fallback.FallbackWarning, match="no compiler") as caught:
        for _ in range(3):
            torch.testing.assert_close(function(*args), reference(*args))
    assert len(caught) == 1


def test_registering_again_replaces_and_another_signature_is_refused() -> None:
    op = make_op("dispatchtest::again")
    function = fuselab.operator(op)
    assert fuselab.operator(op) is function
    doubled = make_op(
        "dispatchtest::again",
        implementations={"cpp": Implementation("cpu", lambda *args: reference(*args) * 2)},
    )
    fuselab.operator(doubled)
    args = _inputs(grad=False)
    torch.testing.assert_close(function(*args), reference(*args) * 2)

    def other(input: Tensor) -> Tensor:
        return input * 2

    with pytest.raises(ContractError, match="registered with another signature"):
        fuselab.operator(make_op("dispatchtest::again", reference=other, gradient=None))


def test_a_reference_the_schema_cannot_express_is_refused() -> None:
    def untyped(input: Tensor, other) -> Tensor:  # type: ignore[no-untyped-def]
        return input

    with pytest.raises(ContractError, match="parameter 'other'"):
        fuselab.operator(make_op("dispatchtest::untyped", reference=untyped, gradient=None))


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


def test_autocast_arguments_come_from_the_contract() -> None:
    op = make_op(
        "dispatchtest::autocasts",
        autocast=lambda dtype, *args: tuple(
            value.float() if isinstance(value, Tensor) else value for value in args
        ),
    )
    function = fuselab.operator(op)
    args = _inputs(grad=False, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert function(*args).dtype == torch.float32
    assert function(*args).dtype == torch.bfloat16


# Sequences of tensors.


def weighted_sum(tables: Sequence[Tensor], weights: Tensor, powers: Sequence[int]) -> Tensor:
    """The sum of weights[t] * tables[t] ** powers[t]."""
    terms = [weights[t] * table ** powers[t] for t, table in enumerate(tables)]
    return torch.stack(terms).sum(0)


def weighted_sum_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    tables: Sequence[Tensor],
    weights: Tensor,
    powers: Sequence[int],
) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = [
        grad_output * weights[t] * powers[t] * table ** (powers[t] - 1) if needs[t] else None
        for t, table in enumerate(tables)
    ]
    terms = [(grad_output * table ** powers[t]).sum() for t, table in enumerate(tables)]
    return (*grads, torch.stack(terms) if needs[-1] else None)


sum_op = fuselab.operator(
    make_op(
        "dispatchtest::weighted_sum",
        reference=weighted_sum,
        implementations={"cpp": Implementation("cpu", weighted_sum, weighted_sum_gradient)},
        gradient=Gradient(save=lambda output, *args: args, reference=weighted_sum_gradient),
    )
)


def _tables(count: int = 3) -> tuple[list[Tensor], Tensor, list[int]]:
    generator = torch.Generator().manual_seed(count)
    tables = [torch.rand(4, dtype=torch.float64, generator=generator) for _ in range(count)]
    weights = torch.rand(count, dtype=torch.float64, generator=generator)
    return tables, weights, [2, 3, 1][:count]


def test_a_sequence_of_tensors_has_every_gradient() -> None:
    tables, weights, powers = _tables()
    tables[0].requires_grad_()
    tables[2].requires_grad_()
    weights.requires_grad_()
    output = sum_op(tables, weights, powers)
    torch.testing.assert_close(output, weighted_sum(tables, weights, powers))
    upstream = torch.randn_like(output)
    leaves = [tables[0], tables[2], weights]
    actual = torch.autograd.grad(output, leaves, upstream)
    expected = torch.autograd.grad(weighted_sum(tables, weights, powers), leaves, upstream)
    torch.testing.assert_close(actual, expected)


def test_a_sequence_of_tensors_differentiates_twice() -> None:
    tables, weights, powers = _tables()
    leaves = [value.requires_grad_() for value in (*tables, weights)]

    def function(*leaves: Tensor) -> Tensor:
        return sum_op(leaves[:-1], leaves[-1], powers)

    assert torch.autograd.gradcheck(function, leaves)
    assert torch.autograd.gradgradcheck(function, leaves)


def test_a_sequence_of_tensors_through_compile_vmap_and_export() -> None:
    tables, weights, powers = _tables()
    leaves = [value.clone().requires_grad_() for value in (*tables, weights)]
    compiled = torch.compile(
        lambda *leaves: sum_op(leaves[:-1], leaves[-1], powers),
        backend="aot_eager",
        fullgraph=True,
    )
    expected = torch.autograd.grad(weighted_sum(leaves[:-1], leaves[-1], powers).sum(), leaves)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves).sum(), leaves), expected)
    stacked = [torch.stack([table, table + 1]) for table in tables]
    mapped = torch.func.vmap(lambda *each: sum_op(each, weights, powers))(*stacked)
    for index in range(2):
        torch.testing.assert_close(
            mapped[index], weighted_sum([table[index] for table in stacked], weights, powers)
        )

    class Module(torch.nn.Module):
        def forward(self, first: Tensor, second: Tensor, weights: Tensor) -> Tensor:
            return sum_op([first, second], weights, [2, 1])

    args = (tables[0], tables[1], weights[:2])
    exported = torch.export.export(Module(), args).module()
    torch.testing.assert_close(exported(*args), weighted_sum(tables[:2], weights[:2], [2, 1]))


def test_what_is_no_sequence_of_tensors_is_refused() -> None:
    tables, weights, powers = _tables()
    with pytest.raises(ArgumentError, match="'tables' must be a list of Tensors, got a float in"):
        sum_op([*tables, 1.0], weights, powers)
    with pytest.raises(ArgumentError, match="'tables' must be a list of Tensors, got Tensor"):
        sum_op(tables[0], weights, powers)
    with pytest.raises(DeviceError, match="'tables' is on meta and 'tables' on cpu"):
        sum_op([tables[0], tables[1].to("meta"), tables[2]], weights, powers)


# Operators that write over their arguments.


def shifted(values: Sequence[Tensor], state: Tensor, step: float) -> tuple[Tensor, ...]:
    """(values + step..., state + 1)."""
    return (*(value + step for value in values), state + 1)


def write_shifted(values: Sequence[Tensor], state: Tensor, step: float) -> None:
    CALLS.append("write")
    for value in values:
        value.data.add_(float(step))  # as a kernel does: unseen by autograd
    state.data.add_(1)


shift_op_ = fuselab.operator(
    make_op(
        "dispatchtest::shift_",
        reference=shifted,
        implementations={"cpp": Implementation("cpu", write_shifted)},
        gradient=None,
        mutates=("values", "state"),
    )
)


@pytest.mark.parametrize("implementation", ["cpp", "reference"])
def test_arguments_are_written_over_and_their_versions_move(implementation: str) -> None:
    values, state = [torch.zeros(3), torch.ones(2, 2)], torch.zeros(1)
    before = [value._version for value in (*values, state)]
    returned = shift_op_(values, state, 0.5, implementation=implementation)
    assert returned is values
    assert [value.tolist() for value in values] == [[0.5] * 3, [[1.5] * 2] * 2]
    assert state.tolist() == [1.0]
    after = [value._version for value in (*values, state)]
    assert all(new > old for old, new in zip(before, after, strict=True))


def test_autograd_sees_that_a_saved_tensor_was_written_over() -> None:
    weight = torch.ones(3, requires_grad=True)
    value = torch.ones(3)
    product = (weight * value).sum()
    shift_op_([value], torch.zeros(1), 1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


def test_writing_over_inside_compile_and_inference_mode() -> None:
    def function(value: Tensor) -> Tensor:
        doubled = value * 2
        shift_op_([doubled], torch.zeros(1), 1.0)
        return doubled * 3

    assert torch.compile(function, backend="aot_eager", fullgraph=True)(torch.ones(2)).tolist() == [
        9.0,
        9.0,
    ]
    with torch.inference_mode():
        assert function(torch.ones(2)).tolist() == [9.0, 9.0]


def test_writing_over_what_must_not_be_written_over_is_refused() -> None:
    state = torch.zeros(1)
    with pytest.raises(DifferentiationError, match="shift_ defines no gradient"):
        shift_op_([torch.ones(3, requires_grad=True)], state, 1.0)
    with pytest.raises(ArgumentError, match="elements share memory"):
        shift_op_([torch.ones(1).expand(3)], state, 1.0)
    both = torch.ones(6)
    with pytest.raises(ArgumentError, match="another of its arguments"):
        shift_op_([both[:4], both[3:]], state, 1.0)
    shift_op_([both[:3], both[3:]], state, 1.0)
    assert both.tolist() == [2.0] * 6
    with pytest.raises(UnsupportedError, match="vmap cannot follow"):
        torch.func.vmap(lambda value: shift_op_([value], state, 1.0)[0])(torch.ones(2, 3))


def test_meta_and_fake_tensors_lie_nowhere_and_so_overlap_nothing() -> None:
    for mode, device in ((contextlib.nullcontext(), "meta"), (FakeTensorMode(), "cpu")):
        with mode:
            values, state = torch.zeros(3, device=device), torch.zeros(1, device=device)
            assert shift_op_([values], state, 1.0)[0] is values


def test_what_no_kernel_can_write_over_is_refused() -> None:
    state = torch.zeros(1)
    with pytest.raises(ArgumentError, match=r"'values' has layout torch\.sparse_coo"):
        shift_op_([torch.ones(2, 2).to_sparse()], state, 1.0)
    with pytest.raises(ArgumentError, match="resolve_neg"):
        shift_op_([torch._neg_view(torch.ones(3))], state, 1.0)


def test_nested_and_quantized_tensors_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # both are announced to change
        nested = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(3, 3)])
        quantized = torch.quantize_per_tensor(torch.ones(2, 3), 0.1, 0, torch.qint8)
    with pytest.raises(ArgumentError, match="'update' is a nested tensor"):
        tanh_op(torch.ones(2, 3), nested)
    with pytest.raises(ArgumentError, match="'input' is a quantized tensor"):
        tanh_op(quantized, torch.ones(2, 3))


@pytest.mark.parametrize("implementation", ["auto", "cpp", "gpu"])
def test_a_choice_that_trips_over_bad_arguments_names_them(implementation: str) -> None:
    """On a GPU a rank of 0 made the choice between kernels an IndexError."""

    def validate(input: Tensor, *rest: Any) -> None:
        if input.dim() < 2:
            raise ShapeError("'input' has no rows")

    def supports(input: Tensor, *rest: Any) -> str | None:
        return "it is too wide" if input.shape[1] > 8 else None

    function = fuselab.operator(
        make_op(
            "dispatchtest::picky",
            validate=validate,
            implementations={
                "cpp": Implementation("cpu", forward, backward, supports),
                "gpu": Implementation("cuda", forward, backward, supports),
            },
        )
    )
    with pytest.raises(ShapeError, match="'input' has no rows"):
        function(torch.ones(3), torch.ones(3), implementation=implementation)
    if implementation == "gpu":
        with pytest.raises(UnsupportedError, match="it runs on cuda"):
            function(torch.ones(2, 3), torch.ones(2, 3), implementation=implementation)
        return
    function(torch.ones(2, 3), torch.ones(2, 3), implementation=implementation)
    broken = make_op(
        "dispatchtest::picky",
        implementations={"cpp": Implementation("cpu", forward, backward, supports)},
    )
    fuselab.operator(broken)
    with pytest.raises(IndexError):  # nothing is wrong with the arguments
        function(torch.ones(3), torch.ones(3), implementation=implementation)


def test_a_float_that_no_kernel_can_take_is_refused() -> None:
    input = torch.ones(2, 3)
    with pytest.raises(DeviceError, match="'scale' is on meta and 'input' on cpu"):
        tanh_op(input, input, None, torch.empty((), device="meta"))
    with pytest.raises(ArgumentError, match=r"'scale' must be a real number, got torch\.complex64"):
        tanh_op(input, input, None, torch.tensor(1j))
    with pytest.raises(ArgumentError, match="'scale' must be a number that a float can hold"):
        tanh_op(input, input, None, 10**400)


def test_a_name_with_an_underscore_and_mutates_go_together() -> None:
    with pytest.raises(ContractError, match="ends in '_' if and only if"):
        make_op("dispatchtest::shift", mutates=("values",), gradient=None)
    with pytest.raises(ContractError, match="has no gradient"):
        make_op("dispatchtest::shift_", mutates=("input",))


def test_a_frozen_argument_refuses_its_gradient_and_names_the_alternative() -> None:
    frozen = fuselab.operator(
        make_op(
            "dispatchtest::frozen",
            gradient=Gradient(
                save=lambda output, *args: args,
                reference=gradient,
                frozen={"update": "detach it"},
            ),
        )
    )
    input, update, _ = _inputs(grad=True)
    with pytest.raises(DifferentiationError, match="frozen: 'update' has no gradient; detach it"):
        frozen(input, update)
    with pytest.raises(DifferentiationError, match="'update' has no gradient"):
        frozen(input, update, implementation="reference")
    assert frozen(input, update.detach()).requires_grad
    with torch.no_grad():
        frozen(input, update)


def test_a_tensor_that_outlived_its_torch_func_transform_has_a_gradient() -> None:
    leaked = []

    def leak(value: Tensor) -> Tensor:
        leaked.append(value * 1)
        return value.sum()

    input, update, bias = _inputs(grad=False)
    torch.func.grad(leak)(input)
    bias.requires_grad_()
    (grad,) = torch.autograd.grad(tanh_op(leaked[0], update, bias).sum(), [bias])
    (expected,) = torch.autograd.grad(reference(input, update, bias).sum(), [bias])
    torch.testing.assert_close(grad, expected)
