"""Launch plans: modes, transforms and kinds of tensors, which a plan must not bypass."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from planned_operator import Planned
from small_cpp_kernels import scaled_relu
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fuselab.runtime import launch_plans

pytestmark = pytest.mark.usefixtures("launcher")


@pytest.fixture
def op() -> Planned:
    return Planned(scaled_relu)


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
