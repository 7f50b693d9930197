"""lora_linear: the public function, its formula and derivatives, its refusals, its cost."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from lora_cases import ALL, operands
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.errors import (
    ArgumentError,
    DifferentiationError,
    DtypeError,
    ShapeError,
    UnknownNameError,
    UnsupportedError,
)
from fuselab.op import Inputs
from fuselab.ops import lora_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.lora_linear.cases import CASES_TO_BEAT
from fuselab.ops.lora_linear.op import OP, prefer, prefer_backward
from fuselab.ops.lora_linear.reference import gradient, in_place


def test_values_by_hand():
    """W = [[1, 2], [3, 4]], A = [[1, -1]], B = [[2], [3]]: x = (5, 7) gives S = -2."""
    output = lora_linear(
        torch.tensor([[5.0, 7.0]]),
        torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        torch.tensor([10.0, -50.0]),
        torch.tensor([[1.0, -1.0]]),
        torch.tensor([[2.0], [3.0]]),
        0.5,
        "relu",
    )
    assert output.tolist() == [[19 + 10 - 2.0, 0.0]]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_the_layer_with_the_merged_weight(activation):
    args = operands(7, 12, 9, 3, activation, torch.float64)
    x, weight, bias, a, b, scale, _ = args
    merged = F.linear(x, weight + scale * b @ a, bias)
    expected = ACTIVATIONS[activation].function(merged)
    torch.testing.assert_close(lora_linear(*args), expected)
    torch.testing.assert_close(in_place(*args), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_gradient_formula_is_the_references_derivative_twice(activation):
    """``gradient`` runs where a kernel ran forward; its own derivative is the second."""
    x, weight, bias, a, b, scale, _ = operands(4, 5, 6, 2, activation, torch.float64)

    def of(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return OP.reference(x, weight, bias, a, b, scale, activation)

    leaves = [value.requires_grad_() for value in (x, a, b)]
    output = of(*leaves)
    upstream = torch.randn_like(output)
    expected = torch.autograd.grad(output, leaves, upstream, create_graph=True)
    from_output = ACTIVATIONS[activation].derivative_of == "output"
    saved = (output if from_output else None, x, weight, bias, a, b, scale, activation)
    grads = gradient((True, False, False, True, True), upstream, *saved)
    ours = [grads[place] for place in (0, 3, 4)]
    penalty = sum(grad.square().sum() for grad in ours)
    known = sum(grad.square().sum() for grad in expected)
    for mine, truth in zip(ours, expected, strict=True):
        torch.testing.assert_close(mine, truth)
    torch.testing.assert_close(
        torch.autograd.grad(penalty, leaves, retain_graph=True), torch.autograd.grad(known, leaves)
    )


def test_frozen_arguments_refuse_their_gradient_and_name_the_alternative():
    x, weight, bias, a, b, scale, activation = operands(4, 5, 6, 2)
    a.requires_grad_()
    for implementation in ("auto", "reference"):
        for name in ("weight", "bias"):
            frozen = {"weight": weight.clone(), "bias": bias.clone()}
            frozen[name].requires_grad_()
            call = (x, frozen["weight"], frozen["bias"], a, b, scale, activation)
            with pytest.raises(DifferentiationError, match=f"'{name}' has no gradient.*detach it"):
                lora_linear(*call, implementation=implementation)
            with torch.no_grad():
                lora_linear(*call, implementation=implementation)
    assert lora_linear(x, weight, bias, a, b, scale).requires_grad


@pytest.mark.parametrize(
    "place, value, error, words",
    [
        (0, torch.ones(()), ShapeError, "'input' has no dimension"),
        (0, torch.ones(4, 5, dtype=torch.int64), DtypeError, "'input' is torch.int64"),
        (0, torch.ones(4, 7), ShapeError, r"'weight' has shape \(6, 5\); expected \(N, 7\)"),
        (1, torch.ones(6), ShapeError, "'weight' has shape"),
        (1, torch.ones(6, 5).half(), DtypeError, "'weight' is torch.float16 and 'input'"),
        (2, torch.ones(5), ShapeError, r"'bias' has shape \(5,\); expected \(6,\)"),
        (3, torch.ones(2, 6), ShapeError, r"'lora_a' has shape \(2, 6\); expected \(r, 5\)"),
        (3, torch.ones(0, 5), ShapeError, "a rank r of 1 or more"),
        (4, torch.ones(6, 3), ShapeError, r"'lora_b' has shape \(6, 3\); expected \(6, 2\)"),
        (5, torch.ones(2), ArgumentError, "'scale' must be a number"),
        (5, "2", ArgumentError, "'scale' must be a number"),
        (6, "relu6", UnknownNameError, "unknown activation 'relu6'"),
    ],
)
def test_bad_input_names_the_argument(place, value, error, words):
    args = list(operands(4, 5, 6, 2))
    args[place] = value
    with pytest.raises(error, match=words):
        lora_linear(*args)


def test_a_gpu_implementation_says_why_it_cannot_run_here():
    with pytest.raises(UnsupportedError, match="it runs on cuda"):
        lora_linear(*operands(4, 5, 6, 2), implementation="triton")


def test_autocast_computes_in_its_dtype_and_returns_float32_gradients():
    x, weight, bias, a, b, scale, activation = operands(4, 5, 6, 2)
    b.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        output = lora_linear(x, weight, bias, a, b, scale, activation)
        expected = OP.reference(x, weight, bias, a, b, scale, activation)
    assert output.dtype == expected.dtype == torch.bfloat16
    assert torch.equal(output, expected)
    (grad,) = torch.autograd.grad(output.sum(), b)
    assert grad.dtype == torch.float32


def test_compiled_with_gradients():
    x, weight, bias, a, b, scale, _ = operands(9, 8, 10, 3)
    leaves = [value.requires_grad_() for value in (x, a, b)]
    compiled = torch.compile(lora_linear, fullgraph=True, dynamic=True, backend="aot_eager")
    output = compiled(x, weight, bias, a, b, scale, "gelu")
    expected = OP.reference(x, weight, bias, a, b, scale, "gelu")
    torch.testing.assert_close(output, expected)
    upstream = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, leaves, upstream),
        torch.autograd.grad(expected, leaves, upstream),
    )


def test_cost_of_a_projection():
    """4096 x 1024 -> 1024, rank 16, bfloat16."""
    rows, inner, columns, rank = CASES_TO_BEAT[0]
    args = OP.bind(
        Inputs(
            (
                torch.empty(rows, inner, dtype=torch.bfloat16, device="meta"),
                torch.empty(columns, inner, dtype=torch.bfloat16, device="meta"),
                None,
                torch.empty(rank, inner, dtype=torch.bfloat16, device="meta"),
                torch.empty(columns, rank, dtype=torch.bfloat16, device="meta"),
                2.0,
            )
        )
    )
    cost = OP.cost(*args)
    assert cost.unit == "bf16"
    assert cost.bytes_read == 2 * (4096 * 1024 + 1024 * 1024 + 2 * 16 * 1024)
    assert cost.bytes_written == 2 * 4096 * 1024
    assert cost.flops == 2 * 4096 * (1024 * 1024 + 16 * 2048) + 2 * 4096 * 1024
    backward = OP.cost_backward(*args)
    assert backward.bytes_written == 2 * (4096 * 1024 + 2 * 16 * 1024)
    assert backward.flops > cost.flops


def test_the_measured_order_on_a_gpu():
    def order(rows, inner, columns, rank, activation="relu", dtype=torch.bfloat16, grad=False):
        with FakeTensorMode():
            x, weight, a, b = (
                torch.empty(shape, dtype=dtype, device="cuda")
                for shape in ((rows, inner), (columns, inner), (rank, inner), (columns, rank))
            )
            args = (x, weight, None, a.requires_grad_(grad), b, 0.5, activation)
            output = x.new_empty(rows, columns)
            backward = prefer_backward(ALL, output, *save(output, *args))
            assert grad or prefer(*args) == backward
            return prefer(*args)[0]

    for sizes in CASES_TO_BEAT:
        assert order(*sizes) == order(*sizes, "tanh", grad=True) == "cuda"
        assert order(*sizes, "gelu", torch.float16) == "cuda"
        # Their backward forms the product again.
        assert order(*sizes, "gelu", grad=True) == order(*sizes, "silu", grad=True) == "reference"
        assert order(*sizes, dtype=torch.float32) == "reference"
    assert order(4096, 1024, 1024, 32) == "cuda"
    # Less output, and a narrower layer, than any measured.
    for sizes in ((2048, 4096, 1024, 8), (2048, 1024, 4096, 8), (65536, 4096, 496, 8)):
        assert order(*sizes) == "triton"
    for sizes in ((4096, 1024, 1024, 33), (4095, 1024, 1024, 8), (8192, 1032, 1024, 8)):
        assert order(*sizes) == "reference"
    assert prefer(*operands(64, 32, 16, 8, dtype=torch.bfloat16)) == ("reference",)
