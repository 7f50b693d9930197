"""square: torch.square's values to the bit, in every layout; its gradient; what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pointwise_cases import LAYOUTS, normal
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.errors import DtypeError
from fuselab.ops import square
from fuselab.ops.square import op as package
from fuselab.ops.square.op import OP
from fuselab.ops.square.reference import gradient
from fuselab.runtime import interpreter

interpreted = partial(interpreter.run, "fuselab.ops.square.op:forward_triton")
interpreted_backward = partial(interpreter.run, "fuselab.ops.square.op:backward_triton")
CASES = [case for case in OP.cases if "boundary" in case.tags]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
KERNELS = {
    "triton": (package.forward_triton, package.backward_triton),
    "cuda": (package.forward_cuda, package.backward_cuda),
}
kernels = pytest.mark.parametrize("kernels", KERNELS.values(), ids=list(KERNELS))


def made(case, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return case.make(torch.device(device), dtype, torch.Generator().manual_seed(0)).args[0]


def assert_right(forward, backward, input: torch.Tensor, upstream: torch.Tensor) -> None:
    """A product rounded once has one right value; the gradient's two, in float32, are exact or
    rounded once as well (2 x is exact), and then once more for 16 bits."""
    output = forward(input)
    assert torch.equal(output, torch.square(input))
    assert output.stride() == torch.empty_like(input).stride()
    (ours,) = backward((True,), upstream, input)
    (exact,) = gradient((True,), upstream, input)
    assert torch.equal(ours, exact) and ours.dtype == input.dtype
    assert ours.stride() == torch.empty_like(input).stride()
    assert backward((False,), upstream, input) == (None,)


@cases
def test_triton_interpreted(case):
    input = made(case)
    upstream = normal(*input.shape, dtype=torch.float32, seed=1)
    assert_right(interpreted, interpreted_backward, input, upstream)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_upstream_layouts_interpreted(layout, dtype):
    input = normal(20, 30, dtype=dtype)
    upstream = LAYOUTS[layout](normal(20, 30, dtype=dtype, seed=1))
    assert_right(interpreted, interpreted_backward, input, upstream)


def test_special_values_interpreted():
    values = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-30, 1e30])
    torch.testing.assert_close(
        interpreted(values), torch.square(values), rtol=0, atol=0, equal_nan=True
    )


@cases
def test_the_public_function(case):
    input = made(case).double().requires_grad_()
    output = square(input)
    assert torch.equal(output, torch.square(input))
    assert output.stride() == OP.fake(input).stride()
    upstream = normal(*output.shape, dtype=torch.float64, seed=3)
    (ours,) = torch.autograd.grad(output, input, upstream)
    torch.testing.assert_close(ours, 2 * upstream * input, rtol=1e-15, atol=0)
    torch.testing.assert_close(gradient((True,), upstream, input)[0], ours, rtol=1e-15, atol=0)


def test_costs_count_every_byte_once():
    input = torch.zeros(8, 16)
    assert OP.cost(input).bytes_moved == 2 * 512
    assert OP.cost_backward(input).bytes_moved == 3 * 512


def test_errors_name_the_argument():
    with pytest.raises(DtypeError, match=r"'input' is torch.int64"):
        square(torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@kernels
@cases
def test_on_a_gpu(case, kernels, dtype):
    input = made(case, dtype, "cuda")
    assert_right(*kernels, input, normal(*input.shape, dtype=dtype, device="cuda", seed=1))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
@kernels
def test_upstream_layouts_on_a_gpu(kernels, layout):
    for dtype in DTYPES:
        input = normal(1 + 64 * 40, dtype=dtype, device="cuda")[1:].view(64, 40)
        upstream = LAYOUTS[layout](normal(64, 40, dtype=dtype, device="cuda", seed=1))
        assert_right(*kernels, input, upstream)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", KERNELS)
def test_first_and_second_derivatives_on_a_gpu(implementation):
    input = normal(3, 5, dtype=torch.float64, device="cuda").requires_grad_()

    def fused(input):
        return square(input, implementation=implementation)

    assert torch.autograd.gradcheck(fused, input)
    assert torch.autograd.gradgradcheck(fused, input)


@pytest.mark.gpu
@kernels
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(kernels):
    input = torch.zeros(2**31 + 5, dtype=torch.bfloat16, device="cuda")
    input[-3:] = 3
    output = kernels[0](input)
    assert torch.equal(output[-3:], 3 * input[-3:]) and not output[:-3].any()
    (ours,) = kernels[1]((True,), torch.ones_like(input), input)
    assert torch.equal(ours[-3:], 2 * input[-3:]) and not ours[:-3].any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_autocast_widens_16_bits_on_a_gpu_alone(dtype):
    with FakeTensorMode():
        on_gpu = torch.empty(2, dtype=dtype, device="cuda")
        (seen,) = OP.autocast(torch.bfloat16, on_gpu)
    assert seen.dtype == (torch.float32 if dtype.itemsize == 2 else dtype)
    on_cpu = torch.ones(2, dtype=dtype)
    assert OP.autocast(torch.bfloat16, on_cpu)[0] is on_cpu
