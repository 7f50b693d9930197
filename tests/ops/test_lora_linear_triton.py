"""The kernels of lora_linear on the CPU, under Triton's interpreter in a child process; bfloat16 is
left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lora_cases import ALL, RANKS, check, laid_out, operands, upstream_of
from pointwise_cases import LAYOUTS, assert_within_bar

from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.lora_linear import launch, tiles
from fuselab.ops.lora_linear.op import save
from fuselab.ops.lora_linear.reference import reference
from fuselab.runtime import interpreter

FORWARD, BACKWARD = (f"fuselab.ops.lora_linear.launch:{step}" for step in ("forward", "backward"))
KERNELS = {
    product.__name__: (
        partial(interpreter.run, FORWARD, product),
        partial(interpreter.run, BACKWARD, product),
    )
    for product in (launch.fused_product, launch.library_product)
}
products = pytest.mark.parametrize("product", KERNELS)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation):
    args = operands(13, 20, 24, 8, activation)
    check(*KERNELS["fused_product"], args)
    forward, _ = KERNELS["library_product"]
    torch.testing.assert_close(forward(*args), reference(*args))


@pytest.mark.parametrize("rank", RANKS[::2])
def test_ranks(rank):
    args = operands(19, 24, 33, rank, "tanh")
    check(*KERNELS["fused_product"], args)
    forward, _ = KERNELS["library_product"]
    torch.testing.assert_close(forward(*args), reference(*args))


@pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 3, 5), (16, 16, 16), (17, 65, 63), (65, 64, 129)])
def test_sizes(sizes):
    check(*KERNELS["fused_product"], operands(*sizes, 3))


def test_sizes_beside_cublas():
    check(*KERNELS["library_product"], operands(17, 65, 130, 3))


@products
def test_float16(product):
    for activation in ("relu", "gelu"):
        check(*KERNELS[product], operands(17, 33, 40, 3, activation, torch.float16))


def test_more_rows_than_one_worker_has():
    check(*KERNELS["fused_product"], operands(300, 20, 24, 4))


@products
@pytest.mark.parametrize("sizes", [(0, 8, 8), (3, 8, 0), (3, 0, 8)])
def test_empty(product, sizes):
    for activation in ("identity", "relu", "gelu"):
        check(*KERNELS[product], operands(*sizes, 2, activation))


def test_without_columns_an_infinite_input_makes_the_nan_that_eager_makes():
    args = operands(3, 8, 0, 2)
    args[0][1, 2] = torch.inf
    grads = KERNELS["fused_product"][1](ALL, torch.empty(3, 0), *save(torch.empty(3, 0), *args))
    assert torch.equal(grads[3].isnan(), (torch.zeros(2, 3) @ args[0]).isnan())


@products
def test_without_bias_and_of_any_leading_dimensions(product):
    forward, backward = KERNELS[product]
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


@products
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(product, layout):
    args = laid_out(operands(20, 18, 33, 5), LAYOUTS[layout])
    upstream = LAYOUTS[layout](upstream_of(torch.empty(20, 33)))
    check(*KERNELS[product], args, upstream)


@products
def test_the_gradients_that_are_needed_and_no_other(product):
    forward, backward = KERNELS[product]
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


@products
def test_scale_through_a_pointer(product):
    forward, backward = KERNELS[product]
    args = operands(9, 16, 20, 4, scale=-1.5)
    pointed = (*args[:5], torch.full((), -1.5), args[6])
    output = forward(*args)
    assert torch.equal(forward(*pointed), output)
    expected = backward(ALL, upstream_of(output), *save(output, *args))
    ours = backward(ALL, upstream_of(output), *save(output, *pointed))
    for grad, known in zip(ours, expected, strict=True):
        assert known is None if grad is None else torch.equal(grad, known)


@products
def test_nan_and_infinity_stay_in_their_row(product):
    args = operands(20, 18, 33, 5, "identity")
    clean = reference(*args)
    for value in (torch.nan, torch.inf):
        args[0][3, 7] = value
        output = KERNELS[product][0](*args)
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
    config = tiles.tile(32, 64, 32, maps=1)
    assert launch._map_layout(x) == "rows"
    assert launch._map_layout(weight) == ("columns" if transposed else "rows")
    fused = partial(interpreter.run, "fuselab.ops.lora_linear.launch:fused_product")
    args = ("", x, weight, bias, projection, b, scale, activation)
    pointers = fused(*args, config=tiles.tile(32, 64, 32))
    torch.testing.assert_close(fused(*args, config=config), pointers)


SMALL = tiles.tile(32, 64, 32, maps=1, programs=3)  # under the interpreter three programs in all


def adapt(x, weight, bias, a, b, scale, activation, projection=None):
    """S by the launch itself, unless it is given."""
    name = "fuselab.ops.lora_linear.launch:_adapt"
    factor = a if projection is None else None
    args = (x, weight, bias, projection, b, scale, activation, SMALL)
    return interpreter.run(name, *args, factor=factor)


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 15, 16, 17, 31, 32])
def test_joint_ranks(rank):
    _check_joint(operands(70, 40, 72, rank, "tanh", torch.float16))


@pytest.mark.parametrize(
    "sizes", [(1, 8, 1), (2, 16, 3), (31, 24, 63), (32, 32, 64), (33, 40, 65), (300, 72, 130)]
)
def test_joint_sizes(sizes):
    """One tile, none whole, and several in turn of one program, in groups of rows cut short."""
    _check_joint(operands(*sizes, 3, "relu", torch.float16))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_joint_activations(activation):
    for has_bias in (True, False):
        _check_joint(operands(37, 24, 40, 8, activation, torch.float16, has_bias=has_bias))


def test_joint_scales():
    args = operands(37, 24, 40, 8, dtype=torch.float16, scale=-1.5)
    output = _check_joint(args)
    pointed = (*args[:5], torch.full((), -1.5), args[6])
    assert torch.equal(adapt(*pointed), output)
    # 0.7 B has more bits than a half: rounded once, it would be off by 2^-12 of itself.
    args = operands(64, 8, 64, 8, "identity", torch.float16, has_bias=False, scale=0.7)
    args[1].zero_()
    projection = (args[0] @ args[3].t()).double()
    exact = 0.7 * projection @ args[4].double().t()
    ours = adapt(*args)
    assert ((ours.double() - exact).abs() <= 2.0**-11 * exact.abs() + 2.0**-20).all()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_joint_loop_on_a_given_projection(transposed):
    for sizes in ((70, 40, 72), (33, 24, 64), (300, 72, 136)):
        args = list(operands(*sizes, 5, "relu", torch.float16, scale=-0.7))
        if transposed:
            args[1] = args[1].t().contiguous().t()
        output = adapt(*args, projection=args[0] @ args[3].t())
        doubles = (arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args)
        assert_within_bar(output, reference(*args), reference(*doubles), "output")


def test_joint_strided_factors_and_bias():
    args = list(operands(37, 24, 40, 8, dtype=torch.float16))
    expected = adapt(*args)
    args[4] = args[4].t().contiguous().t()
    args[2] = args[2].repeat_interleave(2)[::2]
    assert torch.equal(adapt(*args), expected)


def test_joint_nan_and_infinity_stay_where_eager_has_them():
    """Rank 1: no sum of infinities of both signs hides a product 0 * inf of ours."""
    for rank, place, at in ((1, 0, (3, 7)), (5, 0, (3, 7)), (1, 4, (5, 0)), (5, 4, (5, 2))):
        for value in (torch.nan, torch.inf):
            args = operands(40, 16, 72, rank, "identity", torch.float16)
            clean = reference(*args)
            args[place][at] = value
            output, expected = adapt(*args), reference(*args)
            assert torch.equal(output.isnan(), expected.isnan())
            assert torch.equal(output.isinf(), expected.isinf())
            rest = expected.isfinite()
            torch.testing.assert_close(output[rest], clean[rest], rtol=2e-3, atol=2e-3)


def _check_joint(args):
    """Against eager, with the bar's slack: S as eager rounds it, one accumulator."""
    output = adapt(*args)
    exact = reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))
    assert_within_bar(output, reference(*args), exact, "output")
    return output


def test_adapt_tiles_are_offered_where_adapt_may_be_faster():
    half = operands(64, 64, 64, 8, dtype=torch.bfloat16)
    assert {config.programs for config in tiles.forward_tiles(half[0], half[1], 8)} == {0, 1, 2}
    for x, weight, rank in (
        (half[0].half(), half[1].half(), 8),
        (half[0], half[1], 33),
        (half[0], half[1].new_empty(2049, 64), 8),
        (half[0][:, 1:], half[1][:, 1:], 8),
    ):
        assert not any(config.programs for config in tiles.forward_tiles(x, weight, rank))
    assert not any(config.programs for config in tiles.product_tiles(half[0], half[1], 8))


def test_adapt_tiles_fit_an_h200(monkeypatch):
    """Two programs of rank 32 ask for 237,680 bytes, as compiled; of rank 16 for 225,392."""
    monkeypatch.setattr(tiles, "shared_bytes", lambda device: 232_448)
    offered = [tiles._adapt_tiles.__wrapped__(rank, torch.device("cuda")) for rank in (16, 32)]
    assert [len(found) for found in offered] == [8, 6]
    assert {config.programs for config in offered[1]} == {1}


def test_what_a_tensor_map_cannot_read():
    for matrix in (
        torch.empty(4, 9, dtype=torch.float16),
        torch.empty(4, 17, dtype=torch.float16)[:, 1:],
        torch.empty(1, 16, dtype=torch.float16).expand(4, 16),
        torch.empty(4, 32, dtype=torch.float16)[:, ::2],
    ):
        assert launch._map_layout(matrix) == "none"


def test_one_accumulator_rounds_once():
    """16-bit: eager rounds x Wᵀ + bias, the update, its multiple and the sum."""
    args = operands(40, 64, 48, 8, "identity", torch.float16)
    exact = reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))
    projection = (args[0] @ args[3].t()).double()
    rounded = args[0].double() @ args[1].double().t() + args[2].double()
    rounded += 0.5 * projection @ args[4].double().t()
    ours = KERNELS["fused_product"][0](*args)
    assert torch.equal(ours, rounded.half()) or (ours - rounded.half()).abs().max() <= 2.0**-10
    assert (ours.double() - exact).norm() < (reference(*args).double() - exact).norm()


@pytest.mark.parametrize("count", [1, 2, 16, 127, 128, 129, 300])
def test_parts_are_added_up(count):
    """Whole rounds of parts, one cut short, several; elements that no program's share divides."""
    parts = torch.randn(count, 9, 31)
    output = interpreter.run(
        "fuselab.ops.lora_linear.launch:_sum", parts, torch.empty(31, 9).t(), 0.5
    )
    torch.testing.assert_close(output, 0.5 * parts.sum(0))
