"""The Triton kernels of the pointwise operators on the CPU, under Triton's interpreter in a child
process; bfloat16 is left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from pointwise_cases import EXACT, LAYOUTS, assert_float64, check, normal, writable

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.runtime import interpreter

forward = partial(interpreter.run, "fuselab.ops.add_mul_activation.triton_launch:forward")
backward = partial(interpreter.run, "fuselab.ops.add_mul_activation.triton_launch:backward")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    input, update = (normal(13, 37, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(37, dtype=torch.float32, seed=2), activation)


@pytest.mark.parametrize("activation", EXACT)
def test_float64_against_sixty_digits(activation):
    assert_float64(forward, backward, activation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_dtypes(dtype, activation):
    input, update = (normal(5, 33, dtype=dtype, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(33, dtype=dtype, seed=2), activation)


@pytest.mark.parametrize("shape", [(1, 1), (7, 1), (1, 1023), (2, 1024), (2, 1500)], ids=str)
def test_shapes(shape):
    input, update = (normal(*shape, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(shape[-1], dtype=torch.float32, seed=2))
    check(forward, backward, input, update, None)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    input = normal(20, 30, dtype=torch.float32)
    update = LAYOUTS[layout](normal(20, 30, dtype=torch.float32, seed=1))
    upstream = LAYOUTS[layout](normal(20, 30, dtype=torch.float32, seed=2))
    bias = normal(60, dtype=torch.float32, seed=3)[::2]
    check(forward, backward, input, update, bias, "gelu", upstreams=(upstream,))
    check(forward, backward, update, input, None, "relu", upstreams=(upstream,))


def test_loops_that_do_not_collapse():
    input = normal(2, 3, 4, 5, dtype=torch.float32).movedim(1, -1).contiguous().movedim(-1, 1)
    update = normal(2, 3, 4, 5, dtype=torch.float32, seed=1)
    check(forward, backward, input, update, normal(5, dtype=torch.float32, seed=2))


@pytest.mark.parametrize("rows", [1, 127, 128, 129, 512, 513, 1153])
def test_rows_of_every_spread(rows):
    """One multiprocessor, four blocks of rows, tiles of 128 rows: up to three tiles per block."""
    input, update = (normal(rows, 4, dtype=torch.float32, seed=seed) for seed in (0, 1))
    check(forward, backward, input, update, normal(4, dtype=torch.float32, seed=2))


def test_without_update():
    input, bias = normal(9, 40, dtype=torch.float32), normal(40, dtype=torch.float32, seed=1)
    ours = forward(input, None, bias, 1.0, "silu")
    torch.testing.assert_close(ours, torch.nn.functional.silu(input + bias))


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "offset"])
def test_output_over_the_input(layout):
    input, update = (normal(20, 30, dtype=torch.float32, seed=seed) for seed in (0, 1))
    target, _ = writable(layout, input)
    others = (update, normal(30, dtype=torch.float32, seed=2), 0.5, "gelu")
    written = forward(target, *others, output=target)
    assert torch.equal(written, forward(input, *others))
