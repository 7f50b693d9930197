"""The Triton kernels of softmax on the CPU, under Triton's interpreter in a child process.

bfloat16 is left to the GPU: the interpreter's stores truncate.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from softmax_cases import assert_backward, assert_forward, layouts, normal, special_rows

from fuselab.ops.softmax import triton_launch
from fuselab.ops.softmax.triton_launch import triton_candidates
from fuselab.runtime import interpreter, tuning

forward = partial(interpreter.run, "fuselab.ops.softmax.triton_launch:forward")
backward = partial(interpreter.run, "fuselab.ops.softmax.triton_launch:backward")
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:]
)


@dtypes
@pytest.mark.parametrize("width", [1, 2, 3, 16, 17, 128, 129, 1025, 4097])
def test_rows(dtype, width):
    input = normal(3, width, dtype=dtype, seed=width)
    assert_forward(forward, input)
    grad = normal(3, width, dtype=dtype, seed=1)
    assert_backward(backward, torch.softmax(input, -1), grad)


@dtypes
def test_rows_wider_than_a_block(dtype):
    input = normal(2, 40_001, dtype=dtype)
    assert_forward(forward, input)
    assert_backward(backward, torch.softmax(input, -1), normal(2, 40_001, dtype=dtype, seed=1))


@dtypes
@pytest.mark.parametrize(
    "shape, dim", [((2, 5, 7), 1), ((70, 33), 0), ((2, 3, 2), 1), ((1, 3000, 9), 1)]
)
def test_columns(dtype, shape, dim):
    """The last shape is wider than a tile: it is read twice."""
    input = normal(*shape, dtype=dtype)
    assert_forward(forward, input, dim)
    grad = normal(*shape, dtype=dtype, seed=1)
    assert_backward(backward, torch.softmax(input, dim), grad, dim)


@dtypes
@pytest.mark.parametrize("dim", [0, 1])
def test_special_values(dtype, dim):
    input = special_rows(dtype)
    assert_forward(forward, input if dim else input.t().contiguous(), dim)


def test_special_values_in_wide_rows():
    assert_forward(forward, special_rows(torch.float32, 33_000))
    assert_forward(forward, special_rows(torch.float32, 3000).t().contiguous(), 0)


def test_layouts():
    for input, dim in layouts().values():
        assert_forward(forward, input, dim)


def test_upstream_gradients_of_any_stride():
    output = torch.softmax(normal(6, 11), -1)
    for grad in (torch.ones(()).expand(6, 11), normal(11, 6).t(), normal(6, 33)[:, 1::3]):
        assert_backward(backward, output, grad)
        assert_backward(backward, torch.softmax(normal(6, 11), 0), grad, 0)


def test_dtype_casts_first_and_the_gradient_has_the_inputs():
    input = normal(3, 20) * 4
    assert_forward(forward, input.half(), -1, torch.float32)
    assert_forward(forward, input, -1, torch.float16)
    assert_forward(forward, input.to(torch.int32), -1, torch.float64)
    output = torch.softmax(input, -1)
    assert_backward(backward, output, normal(3, 20, seed=1), -1, torch.float16)


def test_any_config_gives_the_same():
    for width in (1000, 40_001):
        input = normal(5, width)
        for place in range(len(triton_candidates("forward", width))):
            assert_forward(partial(interpreter.run, f"{__name__}:by_candidate", place), input)


def by_candidate(
    place: int, input: torch.Tensor, dim: int, dtype: torch.dtype | None
) -> torch.Tensor:
    """In the interpreter's process: the forward by one of tuning's candidates."""
    config = triton_candidates("forward", input.shape[dim])[place]
    with tuning.forced("fuselab::softmax", "triton", config):
        return triton_launch.forward(input, dim, dtype)
