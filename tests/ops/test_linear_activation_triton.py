"""The Triton kernels of linear_activation on the CPU, under Triton's interpreter in a child
process; bfloat16 is left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from linear_cases import LAYOUTS, SHAPES, check, operands

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.linear_activation.reference import gradient, reference
from fuselab.runtime import interpreter
from fuselab.runtime.tuning import Config

forward = partial(interpreter.run, "fuselab.ops.linear_activation.triton_launch:forward")
backward = partial(interpreter.run, "fuselab.ops.linear_activation.triton_launch:backward")


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    check(forward, backward, *operands(19, 13, 20), activation)
    ours = forward(*operands(19, 40, 20), activation)
    torch.testing.assert_close(ours, reference(*operands(19, 40, 20), activation))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(shape):
    check(forward, backward, *operands(*shape))


@pytest.mark.parametrize("depth", [13, 70])
def test_half_precision_without_bias(depth):
    check(forward, backward, *operands(17, depth, 24, torch.float16, bias=False))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    input, weight, bias = operands(20, 20, 20)
    upstream = LAYOUTS[layout](operands(20, 20, 20)[1])
    input, weight = LAYOUTS[layout](input), LAYOUTS[layout](weight)
    bias = bias.repeat_interleave(2)[::2]
    check(forward, backward, input, weight, bias, "silu", upstreams=(upstream,))


@pytest.mark.parametrize("depth", [13, 40])
def test_many_workers_and_tiles_share_the_rows(depth):
    """More tiles of rows than programs, and groups of tiles that the last one does not fill."""
    input, weight, bias = operands(500, depth, 24)
    tile = Config(rows=64, columns=16, depth=16, group=3, warps=4, stages=2, programs=1)
    ours = forward(input, weight, bias, "relu", tile)
    torch.testing.assert_close(ours, reference(input, weight, bias))
    needs, saved = (False, True, True), (ours, input, weight, None, "relu")
    upstream = torch.ones(()).expand_as(ours)
    for grad, theirs in zip(
        backward(needs, upstream, *saved)[1:], gradient(needs, upstream, *saved)[1:], strict=True
    ):
        torch.testing.assert_close(grad, theirs, rtol=1e-5, atol=1e-4)


def test_what_does_not_exist_does_not_leak_in():
    """NaN and infinity stay in their row; masked columns of a bias of infinity add nothing."""
    for depth in (13, 70):
        input, weight, _ = operands(5, depth, 20)
        input[2, 3], input[4, 0] = float("nan"), float("inf")
        bias = torch.full((20,), float("inf"))
        ours = forward(input, weight, bias, "identity")
        theirs = torch.nn.functional.linear(input, weight, bias)
        assert torch.equal(ours.isnan(), theirs.isnan()) and ours[0].isposinf().all()


def test_leading_dimensions_and_empty():
    _, weight, bias = operands(1, 6, 4)
    for shape in ((6,), (2, 3, 6), (0, 6)):
        input = torch.randn(shape)
        ours = forward(input, weight, bias, "tanh")
        torch.testing.assert_close(ours, torch.nn.functional.linear(input, weight, bias).tanh())
    nothing = forward(torch.empty(3, 0), torch.empty(2, 0), torch.tensor([-1.0, 2.0]), "relu")
    assert torch.equal(nothing, torch.tensor([[0.0, 2.0]]).expand(3, 2))
    saved = None, torch.empty(0, 6), weight, None, "identity"
    grads = backward((True, True, True), torch.empty(0, 4), *saved)
    assert grads[0].shape == (0, 6) and not grads[1].any() and not grads[2].any()
