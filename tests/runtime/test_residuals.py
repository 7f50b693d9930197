"""Residuals, which a forward returns for its backward, reach the backward and no user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.errors import ContractError
from fuselab.op import Case, FusedOp, Gradient, Implementation
from fuselab.prove import check_group
from fuselab.prove.check import check


def scale_of(input: Tensor) -> Tensor:
    return torch.rsqrt(input.pow(2).mean(-1, keepdim=True) + 1e-5)


def reference(input: Tensor) -> Tensor:
    return input * scale_of(input)


def residuals(input: Tensor) -> tuple[Tensor]:
    return (scale_of(input),)


def forward(input: Tensor) -> tuple[Tensor, Tensor]:
    (scale,) = residuals(input)
    return input * scale, scale


def backward(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    along = (grad_output * input).mean(-1, keepdim=True)
    return ((grad_output - input * scale * scale * along) * scale,)


def gradient(
    needs: Sequence[bool], grad_output: Tensor, input: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    return backward(needs, grad_output, input, scale_of(input))


def both(input: Tensor) -> tuple[Tensor, Tensor]:
    output = reference(input)
    return output, output > 0


def forward_of_both(input: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    output, scale = forward(input)
    return output, output > 0, scale


def gradient_of_both(
    needs: Sequence[bool], grad_output: Sequence[Tensor], input: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    return gradient(needs, grad_output[0], input, scale)


def backward_of_both(
    needs: Sequence[bool], grad_output: Sequence[Tensor], input: Tensor, scale: Tensor
) -> tuple[Tensor | None, ...]:
    assert len(grad_output) == 2
    return backward(needs, grad_output[0], input, scale)


ONE = FusedOp(
    name="tests::kept_scale",
    reference=reference,
    implementations={"plain": Implementation("cpu", forward, backward)},
    gradient=Gradient(lambda output, input: (input, output[1]), gradient),
    residuals=residuals,
    cases=(Case.normal([(4, 8)], "boundary"),),
)
SEVERAL = FusedOp(
    name="tests::kept_scale_of_two",
    reference=both,
    implementations={"plain": Implementation("cpu", forward_of_both, backward_of_both)},
    gradient=Gradient(lambda output, input: (input, output[2]), gradient_of_both),
    residuals=residuals,
    cases=(Case.normal([(4, 8)], "boundary"),),
)


@pytest.fixture(params=[ONE, SEVERAL], ids=["one output", "two outputs"])
def called(request: pytest.FixtureRequest) -> Callable[..., Tensor]:
    """Return the function of an operator, which gives its first output."""
    public = fuselab.operator(request.param)
    count = request.param.output_count

    def call(input: Tensor, implementation: str = "plain") -> Tensor:
        returned: Any = public(input, implementation=implementation)
        outputs = returned if isinstance(returned, tuple) else (returned,)
        assert len(outputs) == count
        return outputs[0]

    return call


def drawn() -> Tensor:
    return torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("implementation", ["plain", "reference", "auto"])
def test_users_get_the_outputs_alone(called: Callable[..., Tensor], implementation: str) -> None:
    input = drawn().requires_grad_()
    for _ in range(3):  # a later call may come from a launch plan
        torch.testing.assert_close(called(input, implementation), reference(input))
        torch.testing.assert_close(called(input.detach(), implementation), reference(input))


def test_gradients_of_both_orders(called: Callable[..., Tensor]) -> None:
    input = drawn().requires_grad_()
    assert torch.autograd.gradcheck(called, input)
    assert torch.autograd.gradgradcheck(called, input)


def test_under_the_compiler_and_transforms(called: Callable[..., Tensor]) -> None:
    input = drawn().requires_grad_()

    def loss(input: Tensor) -> Tensor:
        return called(input).sin().sum()

    (expected,) = torch.autograd.grad(reference(input).sin().sum(), input)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(torch.autograd.grad(compiled(input), input)[0], expected)
    torch.testing.assert_close(torch.func.grad(loss)(input.detach()), expected)
    rows = torch.func.vmap(lambda row: called(row[None])[0])(input.detach())
    torch.testing.assert_close(rows, reference(input.detach()))


def test_the_raw_operator_returns_residuals_that_have_no_gradient() -> None:
    fuselab.operator(ONE)
    raw = torch.ops.tests.kept_scale.default
    output, scale = raw(drawn().requires_grad_(), "plain")
    assert output.requires_grad and not scale.requires_grad
    assert torch.equal(scale, scale_of(drawn()))
    _, by_reference = raw(drawn(), "reference")
    assert torch.equal(by_reference, scale)


def test_check_judges_the_backward_with_what_the_forward_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = {"cases", "shapes", "outputs", "guards", "operator", "gradients", "some gradients"}
    some = tuple(known for known in check_group.CHECKS if known.name in asked)
    monkeypatch.setattr(check_group, "CHECKS", some)
    report = check(ONE, dtype=torch.float32, quick=True, seed=7)
    assert report.passed, report

    def stale(input: Tensor) -> tuple[Tensor, Tensor]:
        output, scale = forward(input)
        return output, torch.ones_like(scale)

    wrong = {"plain": Implementation("cpu", stale, backward)}
    report = check(
        replace(ONE, name="tests::stale_scale", implementations=wrong),
        dtype=torch.float32,
        quick=True,
        seed=7,
    )
    assert "gradients" in report.failed_checks()


def test_a_declaration_that_cannot_hold_is_refused() -> None:
    with pytest.raises(ContractError):
        replace(ONE, gradient=None)

    def one_tensor(input: Tensor) -> Tensor:
        return scale_of(input)

    with pytest.raises(ContractError):
        fuselab.operator(replace(ONE, name="tests::kept_one", residuals=one_tensor))
    missing = {"plain": Implementation("cpu", reference, backward)}
    lost = replace(ONE, name="tests::kept_nothing", implementations=missing)
    with pytest.raises(ContractError):
        fuselab.operator(lost)(drawn(), implementation="plain")
