"""The public function of an operator on launch plans: what a hit must not skip."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab.errors import ArgumentError, BuildError, DifferentiationError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import builds, fallback, launch_plans
from fuselab.runtime.cpp_source import CppSource, f32, i64
from fuselab.runtime.dispatch import operator
from fuselab.runtime.matmul_precision import allows_tf32

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))
pytestmark = pytest.mark.usefixtures("launcher")


def reference(input: Tensor, scale: float = 1.0) -> Tensor:
    return torch.relu(input * scale)


def reference_gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, scale: float
) -> tuple[Tensor | None, ...]:
    return (grad_output * scale * (output > 0) if needs[0] else None,)


class Counted:
    """An implementation that counts how often its Python ran."""

    def __init__(self) -> None:
        self.forwards = 0

    def forward(self, input: Tensor, scale: float) -> Tensor:
        self.forwards += 1
        output = torch.empty_like(input)
        args = (input, output, i64(input.numel()), f32(scale))
        SOURCE.launch("scaled_relu<float, float>", args)
        return output


def make(**changes: object) -> tuple[FusedOp, Counted]:
    counted = Counted()
    declared: dict = {
        "name": f"runtime_tests::scaled_relu_{uuid4().hex}",
        "reference": reference,
        "implementations": {"cpp": Implementation("cpu", counted.forward)},
        "cost": lambda *args: Cost(0, 0, 0),
        "cases": [Case("one", lambda device, dtype, generator: Inputs((torch.ones(1),)))],
        "gradient": Gradient(
            save=lambda output, input, scale: (output, scale), reference=reference_gradient
        ),
    }
    return FusedOp(**{**declared, **changes}), counted


@pytest.fixture(scope="module", autouse=True)
def built_kernel(launcher: None) -> None:
    """Build the kernel before the calls are counted: one that builds it can have no plan."""
    op, _ = make()
    operator(op)(torch.ones(1), 2.0)
    builds.wait_for_background(120.0)


def test_python_runs_once_for_all_floats_and_spellings() -> None:
    op, counted = make()
    function, value = operator(op), torch.tensor([-1.0, 2.0])
    assert function(value, 2.0).tolist() == [0.0, 4.0]
    assert function(value, 3).tolist() == [0.0, 6.0]
    assert function(value, scale=0.5).tolist() == [0.0, 1.0]
    assert function(value).tolist() == [0.0, 2.0]
    assert counted.forwards == 1


def test_a_validation_that_looks_at_a_float_is_not_skipped() -> None:
    def validate(input: Tensor, scale: float) -> None:
        if scale < 0:
            raise ArgumentError("scale must not be negative.")

    op, _ = make(validate=validate)
    function, value = operator(op), torch.ones(2)
    for _ in range(2):
        assert function(value, 2.0).tolist() == [2.0, 2.0]
        with pytest.raises(ArgumentError, match="must not be negative"):
            function(value, -1.0)


@pytest.mark.parametrize("by_reference", [False, True])
@pytest.mark.parametrize(
    "smallest",
    [
        lambda tensor: tensor.min(),
        lambda tensor: min(tensor.tolist()),
        lambda tensor: tensor.numpy()[0],
    ],
    ids=["operator", "tolist", "numpy"],
)
def test_a_validation_that_looks_at_a_tensor_is_not_skipped(
    smallest: Callable[[Tensor], float], by_reference: bool
) -> None:
    def validate(input: Tensor, scale: float) -> None:
        if smallest(input) < 0:
            raise ArgumentError("input must not be negative.")

    op, _ = make(validate=validate, **({"implementations": {}} if by_reference else {}))
    function = operator(op)
    for _ in range(2):
        assert function(torch.ones(2), 2.0).tolist() == [2.0, 2.0]
        with pytest.raises(ArgumentError, match="must not be negative"):
            function(-torch.ones(2), 2.0)


def test_a_choice_that_looks_at_a_float_is_made_again() -> None:
    counted = Counted()
    supports = lambda input, scale: None if scale < 10 else "scale of 10 or more"  # noqa: E731
    implementation = Implementation("cpu", counted.forward, supports=supports)
    op, _ = make(implementations={"cpp": implementation})
    function, value = operator(op), torch.ones(2)
    for scale in (2.0, 20.0, 2.0, 20.0):
        assert function(value, scale).tolist() == [scale] * 2
    assert counted.forwards == 1


def test_a_gradient_is_not_lost_on_a_plan() -> None:
    op, counted = make()
    function = operator(op)
    function(torch.ones(3), 2.0)
    for scale in (2.0, 3.0):
        value = torch.ones(3, requires_grad=True)
        function(value, scale).sum().backward()
        assert value.grad is not None
        assert value.grad.tolist() == [scale] * 3
    assert counted.forwards == 1  # the forward of an autograd.Function takes the plan


def test_the_raw_operator_takes_the_plan_and_is_one_event_for_the_profiler() -> None:
    op, counted = make()
    function, value = operator(op), torch.ones(3)
    function(value, 2.0)
    raw = getattr(torch.ops.runtime_tests, op.short_name)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        assert raw(value, 5.0, "auto").tolist() == [5.0] * 3
    assert [event.name for event in seen.events()].count(op.name) == 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        function(value, 5.0)
    assert [event.name for event in seen.events()].count(op.name) == 1
    assert counted.forwards == 1


def test_vmap_over_an_operator_with_a_plan() -> None:
    op, _ = make()
    function = operator(op)
    function(torch.ones(3), 2.0)
    batch = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.func.vmap(function)(batch), batch)


# Calls that are known to be the reference's: what they must not skip.


class CountedReference:
    """A choice of the reference that counts how often it is made."""

    def __init__(self, **changes: object) -> None:
        self.choices = 0
        self.op, self.counted = make(prefer=self.prefer, **changes)
        self.function = operator(self.op)

    def prefer(self, input: Tensor, scale: float) -> Sequence[str]:
        self.choices += 1
        return ("reference",)


@pytest.fixture
def chosen() -> CountedReference:
    return CountedReference()


def test_the_choice_of_the_reference_is_made_once_per_kind_of_call(
    chosen: CountedReference,
) -> None:
    value = torch.tensor([-1.0, 2.0])
    for _ in range(3):
        assert chosen.function(value, 2.0).tolist() == [0.0, 4.0]
        assert chosen.function(-value, scale=2.0).tolist() == [2.0, 0.0]
    assert chosen.choices == 1
    assert chosen.function(value, 3.0).tolist() == [0.0, 6.0]  # a value may be looked at
    assert chosen.function(value.double(), 2.0).dtype == torch.float64
    assert chosen.function(value[:1], 2.0).tolist() == [0.0]
    assert chosen.choices == 4
    for _ in range(2):
        assert chosen.function(value, 2.0, implementation="reference").tolist() == [0.0, 4.0]
    assert chosen.choices == 4
    assert chosen.counted.forwards == 0


def test_a_known_reference_has_its_own_gradient(chosen: CountedReference) -> None:
    chosen.function(torch.ones(2), 2.0)
    for _ in range(3):
        value = torch.tensor([-1.0, 2.0], requires_grad=True)
        output = chosen.function(value, 2.0)
        (grad,) = torch.autograd.grad(output.sum(), value)
        assert grad.tolist() == [0.0, 2.0]
        with torch.no_grad():
            assert chosen.function(value, 2.0).grad_fn is None
    assert chosen.choices == 2  # another one may be made where a gradient is needed


def test_frozen_arguments_and_validation_are_refused_past_a_known_reference() -> None:
    def validate(input: Tensor, scale: float) -> None:
        if scale < 0:
            raise ArgumentError("scale must not be negative.")

    gradient = Gradient(lambda output, input, scale: (output, scale), reference_gradient)
    frozen = replace(gradient, frozen={"input": "detach it"})
    chosen = CountedReference(validate=validate, gradient=frozen)
    for _ in range(2):
        assert chosen.function(torch.ones(2), 2.0).tolist() == [2.0, 2.0]
        with pytest.raises(DifferentiationError, match="'input' has no gradient"):
            chosen.function(torch.ones(2, requires_grad=True), 2.0)
        with torch.no_grad():
            assert chosen.function(torch.ones(2, requires_grad=True), 2.0).tolist() == [2.0, 2.0]
        with pytest.raises(ArgumentError, match="must not be negative"):
            chosen.function(torch.ones(2), -1.0)


def test_a_frozen_argument_is_refused_where_another_ones_gradient_was_not() -> None:
    def product(input: Tensor, other: Tensor) -> Tensor:
        return input * other

    def product_gradient(
        needs: Sequence[bool], grad_output: Tensor, input: Tensor, other: Tensor
    ) -> tuple[Tensor | None, ...]:
        return grad_output * other, None

    save = lambda output, *args: args  # noqa: E731
    op, _ = make(
        reference=product,
        implementations={},
        gradient=Gradient(save, product_gradient, frozen={"other": "detach it"}),
    )
    function = operator(op)
    for _ in range(2):
        function(torch.ones(2, requires_grad=True), torch.ones(2)).sum().backward()
        with pytest.raises(DifferentiationError, match="'other' has no gradient"):
            function(torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True))


def test_whoever_wants_to_see_a_call_gets_no_known_reference(chosen: CountedReference) -> None:
    value, function = torch.tensor([-1.0, 2.0]), chosen.function
    function(value, 2.0)
    batch = torch.stack([value, -value])
    assert torch.func.vmap(lambda row: function(row, 2.0))(batch).tolist() == [[0, 4], [2, 0]]
    output, tangent = torch.func.jvp(lambda x: function(x, 2.0), (value,), (torch.ones(2),))
    assert output.tolist() == [0.0, 4.0]
    assert tangent.tolist() == [0.0, 2.0]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(value, torch.ones(2))
        unpacked = torch.autograd.forward_ad.unpack_dual(function(dual, 2.0))
        assert unpacked.tangent is not None
        assert unpacked.tangent.tolist() == [0.0, 2.0]
    before = chosen.choices
    with torch.autocast("cpu", torch.bfloat16):
        assert function(value, 2.0).dtype == torch.float32
    assert chosen.choices == before + 1
    assert torch.equal(torch.compile(function, backend="eager")(value, 2.0), function(value, 2.0))
    raw = getattr(torch.ops.runtime_tests, chosen.op.short_name)
    assert raw(value, 2.0, "auto").tolist() == [0.0, 4.0]  # by the dispatcher, and a new tensor


def test_a_plan_is_not_taken_where_a_gradient_would_choose_the_reference() -> None:
    def prefer(input: Tensor, scale: float) -> Sequence[str]:
        wants_gradient = torch.is_grad_enabled() and input.requires_grad
        return ("reference",) if wants_gradient else ("cpp",)

    op, counted = make(prefer=prefer)
    function, value = operator(op), torch.ones(2)
    for _ in range(3):
        assert function(value, 2.0).tolist() == [2.0, 2.0]
        with torch.no_grad():
            assert function(value.clone().requires_grad_(), 2.0).grad_fn is None
        output = function(value.clone().requires_grad_(), 2.0)
        assert output.grad_fn is not None
        assert output.grad_fn.name() == "ReluBackward0"
    assert counted.forwards == 1


def test_an_output_that_is_an_argument_stays_the_public_functions_alone() -> None:
    def same(input: Tensor, scale: float = 1.0) -> Tensor:
        return input

    chosen = CountedReference(reference=same)
    value = torch.ones(2)
    for _ in range(2):
        assert chosen.function(value, 2.0) is value
    raw = getattr(torch.ops.runtime_tests, chosen.op.short_name)
    assert raw(value, 2.0, "auto").data_ptr() != value.data_ptr()


def test_a_choice_that_asks_for_the_precision_is_made_once_for_each() -> None:
    chosen = CountedReference(validate=lambda input, scale: allows_tf32() and None)
    try:
        for precision, choices in (("highest", 1), ("high", 2), ("highest", 2)):
            torch.set_float32_matmul_precision(precision)
            for _ in range(2):
                assert chosen.function(torch.ones(2), 2.0).tolist() == [2.0, 2.0]
            assert chosen.choices == choices
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_known_reference_is_dropped_with_its_operator(chosen: CountedReference) -> None:
    value = torch.ones(2)
    chosen.function(value, 2.0)
    launch_plans.forget_all()
    chosen.function(value, 2.0)
    assert chosen.choices == 2
    other = replace(chosen.op, reference=reference_times_ten)
    assert operator(other)(value, 2.0).tolist() == [20.0, 20.0]
    assert chosen.function(value, 2.0).tolist() == [20.0, 20.0]


def reference_times_ten(input: Tensor, scale: float = 1.0) -> Tensor:
    return torch.relu(input * scale) * 10


reference_times_ten.__qualname__ = reference.__qualname__  # as if its file was loaded again


def test_an_implementation_that_did_not_build_is_asked_again() -> None:
    def broken(input: Tensor, scale: float) -> Tensor:
        raise BuildError("no compiler today.")

    op, _ = make(implementations={"cpp": Implementation("cpu", broken)})
    function, value = operator(op), torch.ones(2)
    with pytest.warns(fallback.FallbackWarning):
        function(value, 2.0)
    for _ in range(2):
        assert function(value, 2.0).tolist() == [2.0, 2.0]
    fallback.forget()
    with pytest.warns(fallback.FallbackWarning):
        function(value, 2.0)
    fallback.forget()


def test_what_does_not_build_during_a_capture_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op, counted = make()
    fails = True

    def forward(input: Tensor, scale: float) -> Tensor:
        if fails:
            raise BuildError("not while a graph is captured.")
        return counted.forward(input, scale)

    op = replace(op, implementations={"cpp": Implementation("cpu", forward)})
    function, value = operator(op), torch.ones(2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.warns(fallback.FallbackWarning):
            assert function(value, 2.0).tolist() == [2.0, 2.0]
    fails = False
    for _ in range(2):
        assert function(value, 2.0).tolist() == [2.0, 2.0]
    assert counted.forwards == 1
