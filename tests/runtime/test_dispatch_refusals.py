"""Calls and declarations that the public function refuses, and how it names the argument."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tanh_operator import backward, forward, gradient, inputs, make_op, reference, tanh_op
from torch import Tensor

import fuselab
from fuselab.errors import (
    ArgumentError,
    ContractError,
    DeviceError,
    DifferentiationError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.op import Gradient, Implementation


def test_an_operator_without_gradient_refuses_one() -> None:
    plain = fuselab.operator(make_op("dispatchtest::plain", gradient=None))
    args = inputs(grad=True)
    with pytest.raises(DifferentiationError, match="defines no gradient"):
        plain(*args)
    torch.testing.assert_close(plain(*(arg.detach() for arg in args)), reference(*args).detach())


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


def test_a_reference_the_schema_cannot_express_is_refused() -> None:
    def untyped(input: Tensor, other) -> Tensor:  # type: ignore[no-untyped-def]
        return input

    with pytest.raises(ContractError, match="parameter 'other'"):
        fuselab.operator(make_op("dispatchtest::untyped", reference=untyped, gradient=None))


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
    input, update, _ = inputs(grad=True)
    with pytest.raises(DifferentiationError, match=r"frozen: 'update'.*detach it"):
        frozen(input, update)
    with pytest.raises(DifferentiationError, match="'update' has no gradient"):
        frozen(input, update, implementation="reference")
    assert frozen(input, update.detach()).requires_grad
    with torch.no_grad():
        frozen(input, update)
