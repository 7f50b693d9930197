"""The kernels of lora_linear on the CPU, under Triton's interpreter in a child process; bfloat16 is
left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lora_cases import ALL, RANKS, check, laid_out, operands, upstream_of
from pointwise_cases import LAYOUTS

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.lora_linear import configs, triton_launch
from fuselab.ops.lora_linear.reference import reference
from fuselab.runtime import interpreter

FORWARD, BACKWARD = (
    f"fuselab.ops.lora_linear.triton_launch:{step}" for step in ("forward", "backward")
)
KERNELS = (partial(interpreter.run, FORWARD), partial(interpreter.run, BACKWARD))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    args = operands(13, 20, 24, 8, activation)
    check(*KERNELS, args)


@pytest.mark.parametrize("rank", RANKS[::2])
def test_ranks(rank):
    args = operands(19, 24, 33, rank, "tanh")
    check(*KERNELS, args)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (16, 16, 16), (17, 65, 63), (65, 64, 129)])
def test_sizes(sizes):
    check(*KERNELS, operands(*sizes, 3))


def test_float16():
    for activation in ("relu", "gelu"):
        check(*KERNELS, operands(17, 33, 40, 3, activation, torch.float16))


def test_more_rows_than_one_worker_has():
    check(*KERNELS, operands(300, 20, 24, 4))


@pytest.mark.parametrize("sizes", [(0, 8, 8), (3, 8, 0), (3, 0, 8)])
def test_empty(sizes):
    for activation in ("identity", "relu", "gelu"):
        check(*KERNELS, operands(*sizes, 2, activation))


def test_without_columns_an_infinite_input_makes_the_nan_that_eager_makes():
    args = operands(3, 8, 0, 2)
    args[0][1, 2] = torch.inf
    grads = KERNELS[1](ALL, torch.empty(3, 0), *save(torch.empty(3, 0), *args))
    assert torch.equal(grads[3].isnan(), (torch.zeros(2, 3) @ args[0]).isnan())


def test_without_bias_and_of_any_leading_dimensions():
    forward, backward = KERNELS
    args = operands(12, 16, 9, 4, "silu", has_bias=False)
    check(forward, backward, args)
    flat = forward(*args)
    cube = (args[0].view(3, 4, 16), *args[1:])
    output = forward(*cube)
    assert torch.equal(output, flat.view(3, 4, 9))
    grads = backward(ALL, upstream_of(flat).view(3, 4, 9), *save(output, *cube))
    expected = backward(ALL, upstream_of(flat), *save(flat, *args))
    assert torch.equal(grads[0], expected[0].view(3, 4, 16))
    assert torch.equal(grads[3], expected[3]) and torch.equal(grads[4], expected[4])
    vector = (args[0][0], *args[1:])
    torch.testing.assert_close(forward(*vector), reference(*vector))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    args = laid_out(operands(20, 18, 33, 5), LAYOUTS[layout])
    upstream = LAYOUTS[layout](upstream_of(torch.empty(20, 33)))
    check(*KERNELS, args, upstream)


def test_the_gradients_that_are_needed_and_no_other():
    forward, backward = KERNELS
    for rank in (4, 40):
        args = operands(9, 18, 17, rank)
        output = forward(*args)
        saved = save(output, *args)
        everything = backward(ALL, upstream_of(output), *saved)
        for place in (0, 3, 4):
            needs = tuple(other == place for other in range(5))
            grads = backward(needs, upstream_of(output), *saved)
            assert [grad is not None for grad in grads] == list(needs)
            assert torch.equal(grads[place], everything[place])


def test_scale_through_a_pointer():
    forward, backward = KERNELS
    args = operands(9, 16, 20, 4, scale=-1.5)
    pointed = (*args[:5], torch.full((), -1.5), args[6])
    output = forward(*args)
    assert torch.equal(forward(*pointed), output)
    expected = backward(ALL, upstream_of(output), *save(output, *args))
    ours = backward(ALL, upstream_of(output), *save(output, *pointed))
    for grad, known in zip(ours, expected, strict=True):
        assert known is None if grad is None else torch.equal(grad, known)


def test_nan_and_infinity_stay_in_their_row():
    args = operands(20, 18, 33, 5, "identity")
    clean = reference(*args)
    for value in (torch.nan, torch.inf):
        args[0][3, 7] = value
        output = KERNELS[0](*args)
        expected = reference(*args)
        assert torch.equal(output[3].isnan(), expected[3].isnan())
        assert torch.equal(output[3].isinf(), expected[3].isinf())
        rest = torch.arange(20) != 3
        torch.testing.assert_close(output[rest], clean[rest])


@pytest.mark.parametrize("columns", [64, 72])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_tensor_maps_read_what_pointers_do(transposed, columns):
    x, weight, bias, a, b, scale, activation = operands(70, 40, columns, 8, dtype=torch.float16)
    projection = x @ a.t()
    if transposed:
        weight = weight.t().contiguous().t()
    config = configs.tile(32, 64, 32, maps=1)
    assert triton_launch._map_layout(x) == "rows"
    assert triton_launch._map_layout(weight) == ("columns" if transposed else "rows")
    fused = partial(interpreter.run, "fuselab.ops.lora_linear.triton_launch:product")
    args = (x, weight, bias, projection, b, scale, activation)
    pointers = fused(*args, config=configs.tile(32, 64, 32))
    torch.testing.assert_close(fused(*args, config=config), pointers)


def test_what_a_tensor_map_cannot_read():
    for matrix in (
        torch.empty(4, 9, dtype=torch.float16),
        torch.empty(4, 17, dtype=torch.float16)[:, 1:],
        torch.empty(1, 16, dtype=torch.float16).expand(4, 16),
        torch.empty(4, 32, dtype=torch.float16)[:, ::2],
    ):
        assert triton_launch._map_layout(matrix) == "none"


def test_one_accumulator_rounds_once():
    """16-bit: eager rounds x Wᵀ + bias, the update, its multiple and the sum."""
    args = operands(40, 64, 48, 8, "identity", torch.float16)
    exact = reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))
    projection = (args[0] @ args[3].t()).double()
    rounded = args[0].double() @ args[1].double().t() + args[2].double()
    rounded += 0.5 * projection @ args[4].double().t()
    ours = KERNELS[0](*args)
    assert torch.equal(ours, rounded.half()) or (ours - rounded.half()).abs().max() <= 2.0**-10
    assert (ours.double() - exact).norm() < (reference(*args).double() - exact).norm()


@pytest.mark.parametrize("count", [1, 2, 16, 127, 128, 129, 300])
def test_parts_are_added_up(count):
    """Whole rounds of parts, one cut short, several; elements that no program's share divides."""
    parts = torch.randn(count, 9, 31)
    output = interpreter.run(
        "fuselab.ops.lora_linear.triton_launch:_sum", parts, torch.empty(31, 9).t(), 0.5
    )
    torch.testing.assert_close(output, 0.5 * parts.sum(0))
