"""log_softmax on the CPU: the C++ kernels, Triton's under the interpreter, and the contract.

What it shares with softmax (rows' places, casts, refusals) is softmax's to test; here is what the
other form of the kernels changes.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from softmax_cases import (
    BOUNDARY_WIDTHS,
    assert_backward,
    assert_forward,
    layouts,
    normal,
    special_rows,
)

from fuselab.errors import ArgumentError, DtypeError
from fuselab.ops import log_softmax
from fuselab.ops.softmax.op import LOG_SOFTMAX
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
CPP, TRITON = LOG_SOFTMAX.implementations["cpp"], LOG_SOFTMAX.implementations["triton"]
assert_forward = partial(assert_forward, form="log_softmax")
assert_backward = partial(assert_backward, form="log_softmax")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])
interpreted = {
    step: partial(interpreter.run, f"fuselab.ops.softmax.triton_launch:{step}", form="log_softmax")
    for step in ("forward", "backward")
}
# bfloat16 is left to the GPU: the interpreter's stores truncate.
interpreted_dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def check(forward, backward, input: torch.Tensor, dim: int = -1) -> None:
    assert_forward(forward, input, dim)
    grad = normal(*input.shape, dtype=input.dtype, seed=1)
    assert_backward(backward, torch.log_softmax(input, dim), grad, dim)


@dtypes
def test_cpp_rows(dtype):
    for width in (*BOUNDARY_WIDTHS, 4097):
        check(CPP.forward, CPP.backward, normal(3, width, dtype=dtype, seed=width))
    check(CPP.forward, CPP.backward, normal(700, 65, dtype=dtype))


@dtypes
@pytest.mark.parametrize("shape, dim", [((2, 5, 7), 1), ((33, 70), 0), ((3, 40, 129), 1)])
def test_cpp_columns(dtype, shape, dim):
    check(CPP.forward, CPP.backward, normal(*shape, dtype=dtype), dim)


@dtypes
@pytest.mark.parametrize("dim", [0, 1])
def test_special_values(dtype, dim):
    """-inf beside finite elements stays; a row of nothing else, +inf and NaN make NaN."""
    rows = special_rows(dtype)
    input = rows if dim else rows.t().contiguous()
    for implementation in ("cpp", "reference"):
        assert_forward(partial(log_softmax, implementation=implementation), input, dim)
        ours = log_softmax(rows, implementation=implementation)
        assert ours[4, 5:].isneginf().all() and ours[3].isnan().all() and ours[2].isnan().all()
    # A row whose softmax would underflow keeps its logarithms.
    far = torch.tensor([[0.0, -1000.0]], dtype=dtype)
    assert log_softmax(far).tolist() == [[0.0, -1000.0]]


@interpreted_dtypes
@pytest.mark.parametrize("width", [1, 3, 129, 4097, 40_001])
def test_triton_rows(dtype, width):
    check(interpreted["forward"], interpreted["backward"], normal(3, width, dtype=dtype))


@interpreted_dtypes
@pytest.mark.parametrize("shape, dim", [((2, 5, 7), 1), ((70, 33), 0), ((1, 3000, 9), 1)])
def test_triton_columns(dtype, shape, dim):
    check(interpreted["forward"], interpreted["backward"], normal(*shape, dtype=dtype), dim)


@interpreted_dtypes
def test_triton_special_values(dtype):
    for width in (70, 33_000):
        assert_forward(interpreted["forward"], special_rows(dtype, width))
    assert_forward(interpreted["forward"], special_rows(dtype, 3000).t().contiguous(), 0)


@implementations
@pytest.mark.parametrize("layout", layouts())
def test_layouts(implementation, layout):
    input, dim = layouts()[layout]
    assert_forward(partial(log_softmax, implementation=implementation), input, dim)


@implementations
def test_exponentials_sum_to_one(implementation):
    for mean in (0.0, -200.0, 3000.0):
        output = log_softmax(normal(50, 333) + mean, implementation=implementation)
        sums = output.double().exp().sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=2e-6)


@implementations
def test_empty_and_scalar(implementation):
    function = partial(log_softmax, implementation=implementation)
    assert function(torch.tensor(3.0)).item() == 0.0
    assert math.isnan(function(torch.tensor(-math.inf)).item())
    for shape, dim in (((0, 3), 1), ((3, 0), 1), ((3, 0), 0)):
        output = function(torch.empty(shape, requires_grad=True), dim)
        assert output.shape == shape
        output.sum().backward()


@implementations
def test_dtype_casts_first_and_the_gradient_has_the_inputs(implementation):
    function = partial(log_softmax, implementation=implementation)
    for source in (*DTYPES, torch.int32):
        for dtype in DTYPES:
            input = (normal(3, 20, dtype=torch.float64) * 4).to(source)
            assert_forward(function, input, -1, dtype)
            if source.is_floating_point:
                input.requires_grad_()
                grad = normal(3, 20, dtype=dtype, seed=1)
                (ours,) = torch.autograd.grad(function(input, -1, dtype), input, grad)
                eager = torch.log_softmax(input, -1, dtype=dtype)
                (expected,) = torch.autograd.grad(eager, input, grad)
                assert ours.dtype == source
                limit = 4 * max(torch.finfo(kind).eps for kind in (source, dtype))
                torch.testing.assert_close(ours.double(), expected.double(), rtol=limit, atol=limit)


@pytest.mark.parametrize("shape, dim", [((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((), -1)])
def test_first_and_second_derivatives(shape, dim):
    input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: log_softmax(value, dim), input)
    assert torch.autograd.gradgradcheck(lambda value: log_softmax(value, dim), input)


@implementations
def test_upstream_gradients_of_any_stride(implementation):
    input = normal(6, 11).requires_grad_()
    for grad in (torch.ones(()).expand(6, 11), normal(11, 6, seed=3).t(), normal(6, 33)[:, 1::3]):
        for dim in (0, 1):
            ours, eager = (
                torch.autograd.grad(function(input, dim), input, grad)[0]
                for function in (
                    partial(log_softmax, implementation=implementation),
                    torch.log_softmax,
                )
            )
            torch.testing.assert_close(ours, eager)


@pytest.mark.parametrize(
    "rewrite", LOG_SOFTMAX.rewrites, ids=lambda rewrite: rewrite.pattern.__name__
)
def test_rewrites_compute_the_same(rewrite):
    input = normal(3, 5, 7)
    inputs = rewrite.call(input, 1)
    torch.testing.assert_close(
        log_softmax(*inputs.args, **inputs.kwargs), rewrite.pattern(input, 1)
    )


def test_refusals_name_the_operator():
    with pytest.raises(ArgumentError, match=r"log_softmax: 'dim' is 2.* -2"):
        log_softmax(torch.ones(3, 4), 2)
    with pytest.raises(DtypeError, match=r"log_softmax: 'input' is torch\.int64"):
        log_softmax(torch.ones(3, dtype=torch.int64))
