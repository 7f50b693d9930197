"""The public function of an operator on launch plans: what a hit must not skip."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from uuid import uuid4

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab.errors import ArgumentError
from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime import launcher
from fuselab.runtime.cpp_source import CppSource, f32, i64
from fuselab.runtime.dispatch import operator

SOURCE = CppSource(Path(__file__).with_name("kernels.cpp"))


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


@pytest.fixture(autouse=True, scope="module")
def started() -> None:
    assert launcher.start()


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
