"""add: torch.add's values to the bit, in every layout; its gradients; what it refuses."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pointwise_cases import normal

from fuselab.errors import DtypeError, ShapeError
from fuselab.ops import add
from fuselab.ops.add.op import OP, forward_cuda, forward_triton
from fuselab.ops.add.reference import gradient
from fuselab.runtime import interpreter

interpreted = partial(interpreter.run, "fuselab.ops.add.op:forward_triton")
CASES = [case for case in OP.cases if "boundary" in case.tags]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def made(case, dtype: torch.dtype = torch.float32, device: str = "cpu"):
    return case.make(torch.device(device), dtype, torch.Generator().manual_seed(0)).args


def assert_same(ours: torch.Tensor, input: torch.Tensor, other: torch.Tensor) -> None:
    """A sum rounded once has one right value."""
    exact = torch.add(input, other)
    assert ours.dtype == exact.dtype and ours.shape == exact.shape
    assert torch.equal(ours.nan_to_num(1e4), exact.nan_to_num(1e4))
    assert torch.equal(ours.isnan(), exact.isnan())
    assert torch.equal(ours.signbit(), exact.signbit())


@cases
def test_triton_interpreted(case):
    input, other = made(case)
    ours = interpreted(input, other)
    assert_same(ours, input, other)
    assert ours.stride() == OP.fake(input, other).stride()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_triton_dtypes_interpreted(dtype):
    input, other = (normal(5, 33, dtype=dtype, seed=seed) for seed in (0, 1))
    assert_same(interpreted(input, other), input, other)
    assert_same(interpreted(input, other[0].float()), input, other[0].float())


def test_special_values_interpreted():
    inf, nan = float("inf"), float("nan")
    values = torch.tensor([0.0, -0.0, inf, -inf, nan, 1e-40, 3e38])
    assert_same(interpreted(values, values[:, None]), values, values[:, None])


@cases
def test_the_public_function(case):
    input, other = (tensor.double().requires_grad_() for tensor in made(case))
    output = add(input, other)
    assert_same(output, input, other)
    assert output.shape == OP.fake(input, other).shape
    upstream = normal(*output.shape, dtype=torch.float64, seed=3)
    ours = gradient((True, True), upstream, *OP.gradient.save(output, input, other))
    theirs = torch.autograd.grad(torch.add(input, other), (input, other), upstream)
    for one, two in zip(ours, theirs, strict=True):
        assert torch.equal(one, two)


def test_gradients_take_their_tensors_dtype():
    upstream = normal(4, 5, dtype=torch.float32)
    only_other = gradient((False, True), upstream, (4, 5), (5,), torch.float32, torch.float16)
    assert only_other[0] is None
    assert torch.equal(only_other[1], upstream.sum(0).half())


def test_promotion_is_torchs():
    single, half = torch.ones(3), torch.ones(3, dtype=torch.float16)
    assert add(half, single).dtype == torch.float32
    assert add(half, single.bfloat16()).dtype == torch.float32
    assert add(half, single[0]).dtype == torch.float16
    for pair in ((half, single), (half, single[0]), (single[0], half)):
        assert OP.fake(*pair).dtype == torch.add(*pair).dtype


def test_costs_count_every_byte_once():
    args = torch.zeros(8, 16), torch.zeros(16)
    assert OP.cost(*args).bytes_read == 4 * (128 + 16)
    assert OP.cost(*args).bytes_written == 4 * 128
    assert OP.cost_backward(*args).bytes_moved == 4 * (128 + 16)
    assert OP.cost_backward(args[0], args[0]).bytes_moved == 0


def test_errors_name_the_argument():
    with pytest.raises(ShapeError, match=r"'other' has shape \(3,\) and 'input' \(2, 4\)"):
        add(torch.zeros(2, 4), torch.zeros(3))
    with pytest.raises(DtypeError, match=r"'other' is torch.int64"):
        add(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("forward", [forward_triton, forward_cuda], ids=["triton", "cuda"])
@cases
def test_on_a_gpu(case, forward, dtype):
    input, other = made(case, dtype, "cuda")
    assert_same(forward(input, other), input, other)


@pytest.mark.gpu
@pytest.mark.parametrize("forward", [forward_triton, forward_cuda], ids=["triton", "cuda"])
def test_unaligned_and_mixed_on_a_gpu(forward):
    input = normal(1 + 64 * 40, dtype=torch.float16, device="cuda")[1:].view(64, 40)
    for other in (
        normal(64, 40, dtype=torch.bfloat16, device="cuda", seed=1),
        normal(41, dtype=torch.float64, device="cuda", seed=2)[1:],
        normal(64, 1, dtype=torch.float32, device="cuda", seed=3),
    ):
        assert_same(forward(input, other), input, other)


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 1023])
@pytest.mark.parametrize("forward", [forward_triton, forward_cuda], ids=["triton", "cuda"])
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(forward, columns):
    rows = 2**31 // columns + 3
    input = torch.zeros(rows, columns, dtype=torch.bfloat16, device="cuda")
    input[-1] = 5
    other = torch.arange(columns, device="cuda").to(torch.bfloat16)
    output = forward(input, other)
    assert torch.equal(output[-1], other + 5) and torch.equal(output[rows // 2], other)
    del output
    output = forward(input, input)
    assert torch.equal(output[-1], input[-1] + 5) and not output[:-1].any()
