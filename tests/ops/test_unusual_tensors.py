"""Operators treat unusual tensors as eager does, on the first call and on those from a held plan.

Each kind is a way to make a tensor that autograd, torch.func or a mode treats specially. What must
equal eager's: whether the output requires a gradient, has a node, is a leaf, is an inference
tensor; the gradients' values; and whether the call or its backward raises.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import fuselab
from fuselab.runtime import launch_plans
from fuselab.runtime.dispatch import registered

CALLS = (1, 2, 3)


@functools.cache  # drawn once: torch.func.vmap refuses to draw
def numbers(*shape: int, seed: int = 0) -> Tensor:
    """float32 values in (0, 2), which float64 holds too."""
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode(False):  # whichever test draws them first
        return 2 * torch.rand(shape, generator=generator)


# The arguments of each operator, of which the first has shape (4, 4).
BOXES = torch.tensor([0.0, 0.0, 3.0, 3.0])
ARGUMENTS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "add": lambda z: (z, numbers(4, 4, seed=1).to(z)),
    "add_mul_activation": lambda z: (
        z,
        numbers(4, 4, seed=1).to(z),
        numbers(4, seed=2).to(z),
        0.5,
        "tanh",
    ),
    "bias_activation": lambda z: (z, numbers(4, seed=2).to(z), "silu"),
    "cat_interaction": lambda z: (z, numbers(4, 3, 4, seed=1).to(z)),
    "dot_interaction": lambda z: (z, numbers(4, 3, 4, seed=1).to(z)),
    "embedding_lookup": lambda z: ([z], torch.tensor([[1], [3], [1]])),
    "generalized_box_iou_loss": lambda z: (z, (numbers(4, 4, seed=1) + BOXES).to(z)),
    "linear_activation": lambda z: (z, numbers(3, 4, seed=1).to(z), numbers(3, seed=2).to(z)),
    "linear_binary_cross_entropy": lambda z: (
        z,
        numbers(1, 4, seed=1).to(z),
        None,
        (numbers(4, 1, seed=2) / 2).to(z),
    ),
    "linear_sigmoid": lambda z: (z, numbers(1, 4, seed=1).to(z)),
    "log_softmax": lambda z: (z,),
    "lora_linear": lambda z: (
        z,
        numbers(3, 4, seed=1).to(z),
        None,
        numbers(2, 4, seed=2).to(z),
        numbers(3, 2, seed=3).to(z),
        0.5,
    ),
    "mlp": lambda z: (z, [numbers(3, 4, seed=1).to(z), numbers(2, 3, seed=2).to(z)]),
    "outer_interaction_linear": lambda z: (
        z,
        numbers(4, 2, 4, seed=1).to(z),
        numbers(3, 144, seed=2).to(z),
    ),
    "softmax": lambda z: (z,),
    "square": lambda z: (z,),
}
operators = pytest.mark.parametrize("name", ARGUMENTS)


def ours(name: str) -> Callable[[Tensor], Tensor]:
    function = getattr(fuselab.ops, name)
    return lambda z: function(*ARGUMENTS[name](z))


def eagers(name: str) -> Callable[[Tensor], Tensor]:
    """The same in plain PyTorch."""
    getattr(fuselab.ops, name)
    reference = registered()[f"fuselab::{name}"].reference
    return lambda z: reference(*ARGUMENTS[name](z))


def values(name: str, dtype: torch.dtype, call: int) -> Tensor:
    made = numbers(4, 4, seed=10 + call)
    return (made + (BOXES if name == "generalized_box_iou_loss" else 0)).to(dtype)


# Each kind makes from values the tensor that the operator gets, and the leaf whose gradient counts.


class OwnParameter(torch.nn.Parameter):
    """A Parameter of somebody else's class."""


def leaf(made: Tensor) -> tuple[Tensor, Tensor]:
    made.requires_grad_()
    return made, made


def view(made: Tensor) -> tuple[Tensor, Tensor]:
    flat = made.flatten().clone().requires_grad_()
    return flat.view(4, 4), flat


def view_under_no_grad(made: Tensor) -> tuple[Tensor, Tensor]:
    """It requires a gradient, as its base does, and has no edge to it."""
    flat = made.flatten().clone().requires_grad_()
    with torch.no_grad():
        return flat.view(4, 4), flat


def strided_view_under_no_grad(made: Tensor) -> tuple[Tensor, Tensor]:
    wide = torch.zeros(4, 8, dtype=made.dtype)
    wide[:, ::2] = made
    wide.requires_grad_()
    with torch.no_grad():
        return wide[:, ::2], wide


def view_under_inference_mode(made: Tensor) -> tuple[Tensor, Tensor]:
    flat = made.flatten().clone().requires_grad_()
    with torch.inference_mode():
        return flat.view(4, 4), flat


def view_under_no_grad_of_a_result(made: Tensor) -> tuple[Tensor, Tensor]:
    flat = made.flatten().clone().requires_grad_()
    result = flat * 1
    with torch.no_grad():
        return result.view(4, 4), flat


def detached_leaf(made: Tensor) -> tuple[Tensor, Tensor]:
    return leaf(made.clone().requires_grad_().detach())


def result(made: Tensor) -> tuple[Tensor, Tensor]:
    made.requires_grad_()
    return made * 1, made


def leaf_with_a_hook(made: Tensor) -> tuple[Tensor, Tensor]:
    made.requires_grad_().register_hook(lambda grad: 2 * grad)
    return made, made


def result_with_a_hook(made: Tensor) -> tuple[Tensor, Tensor]:
    output, made = result(made)
    output.register_hook(lambda grad: 3 * grad)
    return output, made


def parameter(made: Tensor) -> tuple[Tensor, Tensor]:
    return leaf(torch.nn.Parameter(made))


def own_parameter(made: Tensor) -> tuple[Tensor, Tensor]:
    return leaf(OwnParameter(made))


def inference_tensor(made: Tensor) -> tuple[Tensor, Tensor]:
    with torch.inference_mode():
        made = made.clone()
    return made, made


def plain(made: Tensor) -> tuple[Tensor, Tensor]:
    return made, made


KINDS = (
    leaf,
    view,
    view_under_no_grad,
    strided_view_under_no_grad,
    view_under_inference_mode,
    view_under_no_grad_of_a_result,
    detached_leaf,
    result,
    leaf_with_a_hook,
    result_with_a_hook,
    parameter,
    own_parameter,
    inference_tensor,
    plain,
)
MODES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


def outcome(function: Callable[[Tensor], Tensor], z: Tensor, of: Tensor, mode: str) -> list[Any]:
    """What can be seen of one call and its backward; tensors last."""
    with MODES[mode]():
        output = function(z)
        facts = [output.requires_grad, output.grad_fn is None, output.is_leaf]
        facts += [output.is_inference(), type(output)]
    tensors = [output.detach()]
    if output.requires_grad:
        upstream = numbers(*output.shape, seed=99).to(output)
        output.backward(upstream)
        facts.append(of.grad is None)
        if of.grad is not None:
            tensors.append(of.grad)
    return [facts, tensors]


def same(found: list[Any], expected: list[Any], what: str) -> None:
    """Compare with eager's outcome in float64."""
    assert found[0] == expected[0], what
    for mine, theirs in zip(found[1], expected[1], strict=True):
        with torch.no_grad():
            torch.testing.assert_close(
                mine.clone(), theirs.to(mine.dtype), msg=lambda said: f"{what}: {said}"
            )


@pytest.fixture(autouse=True)
def no_plans_yet() -> None:
    """The first call of each test is one without a plan."""
    assert launch_plans.start()
    launch_plans.forget_all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", KINDS)
@operators
def test_autograd_sees_what_it_sees_of_eager(name: str, kind: Any, mode: str) -> None:
    for call in CALLS:
        found = outcome(ours(name), *kind(values(name, torch.float32, call)), mode)
        expected = outcome(eagers(name), *kind(values(name, torch.float64, call)), mode)
        same(found, expected, f"{name}, {kind.__name__}, {mode}, call {call}")


@pytest.mark.parametrize("kind", KINDS)
@operators
def test_a_plan_kept_for_ordinary_tensors_serves_unusual_ones_alike(name: str, kind: Any) -> None:
    for call in CALLS:
        outcome(ours(name), *plain(values(name, torch.float32, call)), "grad")
        outcome(ours(name), *leaf(values(name, torch.float32, call)), "grad")
    for call in CALLS:
        found = outcome(ours(name), *kind(values(name, torch.float32, call)), "grad")
        expected = outcome(eagers(name), *kind(values(name, torch.float64, call)), "grad")
        same(found, expected, f"{name}, {kind.__name__}, call {call}")


def test_the_gradient_of_another_argument_is_not_lost_beside_a_view_under_no_grad() -> None:
    for call in CALLS:
        z, flat = view_under_no_grad(numbers(4, 4, seed=call).clone())
        bias = numbers(4, seed=7).clone().requires_grad_()
        fuselab.ops.bias_activation(z, bias, "identity").sum().backward()
        assert flat.grad is None
        assert bias.grad is not None
        assert bias.grad.tolist() == [4.0] * 4


def test_a_saved_tensor_that_changed_is_noticed_without_an_edge_too() -> None:
    """Eager's backward unpacks what it saved whether or not a gradient is asked for."""
    for call in CALLS:
        for function in (fuselab.ops.softmax, lambda z: torch.softmax(z, -1)):
            z, _ = view_under_no_grad(numbers(4, 4, seed=call).clone())
            output = function(z)
            with torch.no_grad():
                output += 1
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                output.sum().backward()


def test_an_inference_tensor_is_not_saved_for_a_backward() -> None:
    for _ in CALLS:
        update, _ = inference_tensor(numbers(4, 4))
        for function in (
            lambda a, b: fuselab.ops.linear_sigmoid(a, b),
            lambda a, b: torch.sigmoid(a @ b.t()),
        ):
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
                function(update, numbers(1, 4).clone().requires_grad_())


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Any]] = {
    "grad": lambda function, z: torch.func.grad(lambda x: function(x).sum())(z),
    "vjp": lambda function, z: torch.func.vjp(function, z)[1](torch.ones_like(function(z)))[0],
    "jvp": lambda function, z: torch.func.jvp(function, (z,), (torch.ones_like(z),)),
    "vmap": lambda function, z: torch.func.vmap(function)(torch.stack([z, z + 1])),
    "grad of vmap": lambda function, z: torch.func.grad(
        lambda x: torch.func.vmap(function)(torch.stack([x, x + 1])).sum()
    )(z),
    "jacrev": lambda function, z: torch.func.jacrev(function)(z),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@operators
def test_functorch_gets_the_values_of_eager(name: str, transform: str) -> None:
    run = TRANSFORMS[transform]
    for call in CALLS:
        ours(name)(values(name, torch.float32, call))  # so that there is a plan to pass by
        z = values(name, torch.float32, call)
        found = torch.utils._pytree.tree_leaves(run(ours(name), z))
        expected = torch.utils._pytree.tree_leaves(run(eagers(name), z.double()))
        for mine, theirs in zip(found, expected, strict=True):
            assert not mine.requires_grad
            torch.testing.assert_close(mine, theirs.to(mine.dtype))


@operators
def test_tangents_are_carried_on(name: str) -> None:
    for call in CALLS:
        ours(name)(values(name, torch.float32, call))
        found, expected = [], []
        for function, dtype, kept in (
            (ours(name), torch.float32, found),
            (eagers(name), torch.float64, expected),
        ):
            z = values(name, dtype, call)
            with forward_ad.dual_level():
                output = function(forward_ad.make_dual(z, torch.ones_like(z)))
                kept += forward_ad.unpack_dual(output)
        assert found[1] is not None, f"call {call}"
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype))


@pytest.mark.parametrize("needs_grad", [False, True])
@operators
def test_fake_tensors_stay_fake(name: str, needs_grad: bool) -> None:
    for call in CALLS:
        ours(name)(values(name, torch.float32, call))
        facts = []
        for function in (ours(name), eagers(name)):
            with FakeTensorMode(allow_non_fake_inputs=True):
                z = torch.empty(4, 4, requires_grad=needs_grad)
                output = function(z)
                facts.append((type(output), output.shape, output.dtype, output.requires_grad))
                facts[-1] += (output.grad_fn is None,)
                if needs_grad:
                    output.sum().backward()
                    facts[-1] += (type(z.grad), z.grad.shape)
        assert facts[0] == facts[1], f"call {call}"


class Layer(torch.nn.Module):
    """The operator's first argument as a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.z = torch.nn.Parameter(torch.zeros(4, 4))
        self.function = function

    def forward(self) -> Tensor:
        return self.function(self.z)


@pytest.mark.parametrize("kind", [leaf, view, view_under_no_grad, result, plain])
@operators
def test_functional_call_takes_the_tensors_it_is_given(name: str, kind: Any) -> None:
    def called(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        layer = Layer(function)
        return lambda z: torch.func.functional_call(layer, {"z": z}, ())

    for call in CALLS:
        found = outcome(called(ours(name)), *kind(values(name, torch.float32, call)), "grad")
        expected = outcome(called(eagers(name)), *kind(values(name, torch.float64, call)), "grad")
        same(found, expected, f"{name}, {kind.__name__}, call {call}")
