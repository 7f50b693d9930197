"""The Triton kernels of linear_sigmoid and linear_binary_cross_entropy on the CPU, under Triton's
interpreter in a child process; bfloat16 is left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from logit_cases import LAYOUTS, SHAPES, assert_each_loss, assert_infinite_targets, check, operands

from fuselab.runtime import interpreter

forward = partial(interpreter.run, "fuselab.ops.linear_sigmoid.triton_launch:forward")
backward = partial(interpreter.run, "fuselab.ops.linear_sigmoid.triton_launch:backward")
REDUCTIONS = (None, "none", "mean", "sum")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    upstream = torch.ones(shape[0], 1)
    check(forward, backward, *operands(*shape), upstreams=(upstream,))
    check(forward, backward, *operands(*shape), "mean", upstreams=(upstream[0, 0],))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_half_precision_without_bias(reduction):
    check(forward, backward, *operands(20, 40, torch.float16, bias=False), reduction)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    input, weight, bias, target = operands(40, 40)
    upstream = LAYOUTS[layout](input)[:, :1]
    weight = LAYOUTS[layout](weight.expand(2, 40))[:1]
    target = target.expand(40, 3).clone()[:, 1:2]
    check(forward, backward, LAYOUTS[layout](input), weight, bias, upstreams=(upstream,))
    args = (LAYOUTS[layout](input), weight, bias, target, "none")
    check(forward, backward, *args, upstreams=(upstream,))


def test_targets_of_another_dtype_promote():
    input, weight, bias, target = operands(30, 50, torch.float16)
    check(forward, backward, input, weight, bias, target.float(), "mean")


def test_losses_where_a_probability_would_round():
    assert_each_loss(forward)


def test_infinite_targets():
    assert_infinite_targets(backward)


def test_an_infinite_bias_does_not_leak_from_rows_that_are_not_there():
    input, weight, _, target = operands(3, 5)
    bias = torch.tensor([math.inf])
    grads = backward((True, True, True), torch.ones(3, 1), target, input, weight, bias, "none")
    expected = (1 - target).sum().reshape(1)
    torch.testing.assert_close(grads[2], expected)
