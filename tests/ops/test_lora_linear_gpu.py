"""The kernels of lora_linear on a GPU: both products, every dtype, tensor maps, wide offsets."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lora_cases import ALL, RANKS, check, laid_out, operands, upstream_of
from pointwise_cases import LAYOUTS

from fuselab.ops import lora_linear
from fuselab.ops.activations import ACTIVATIONS
from fuselab.ops.lora_linear import launch, tiles
from fuselab.ops.lora_linear.op import OP, save
from fuselab.ops.lora_linear.reference import reference
from fuselab.runtime.fallback import strict
from fuselab.runtime.tuning import Config, forced

pytestmark = pytest.mark.gpu

KERNELS = {
    product.__name__: (partial(launch.forward, product), partial(launch.backward, product))
    for product in (launch.fused_product, launch.library_product)
}
products = pytest.mark.parametrize("product", KERNELS)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
on_gpu = partial(operands, device="cuda")


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


@products
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes(product, dtype, activation):
    check(*KERNELS[product], on_gpu(1031, 264, 520, 16, activation, dtype))


@products
@dtypes
@pytest.mark.parametrize("rank", [*RANKS, 128, 200])
def test_ranks(product, dtype, rank):
    check(*KERNELS[product], on_gpu(517, 136, 264, rank, "tanh", dtype))


@products
@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2, 3, 5), (63, 65, 127), (129, 257, 255), (4099, 64, 72), (33, 4104, 40)],
    ids=str,
)
def test_sizes(product, sizes):
    for dtype in (torch.float32, torch.bfloat16):
        check(*KERNELS[product], on_gpu(*sizes, 16, "relu", dtype))


@products
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(product, layout):
    args = laid_out(on_gpu(257, 130, 264, 8, dtype=torch.bfloat16), LAYOUTS[layout])
    upstream = LAYOUTS[layout](upstream_of(args[0].new_empty(257, 264)))
    check(*KERNELS[product], args, upstream)


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_every_tile_of_the_product_is_right(transposed):
    x, weight, bias, a, b, scale, activation = on_gpu(650, 336, 720, 16, dtype=torch.bfloat16)
    projection = x @ a.t()
    if transposed:
        weight = weight.t().contiguous().t()
    operands = (x, weight, bias, projection, b)
    doubles = (value.double() for value in operands)
    exact = reference_of_product(*doubles, scale)
    ulp = 2.0**-8 * exact.abs().clamp(min=2.0**-6)
    candidates = tiles.product_tiles(x, weight, 16)
    assert [config.maps for config in candidates] == [0] + 12 * [1]
    by_pointers = [Config(**{**config, "maps": 0}) for config in candidates if config.group == 8]
    for config in (*candidates, *by_pointers):
        ours = launch.fused_product("", *operands, scale, activation, config)
        assert bool(((ours.double() - exact).abs() <= ulp).all()), config


def reference_of_product(x, weight, bias, projection, up, scale):
    return torch.relu(x @ weight.t() + bias + scale * projection @ up.t())


JOINT = (launch.fused_forward, partial(launch.backward, launch.fused_product))


def joint_tiles(args):
    found = [
        tile for tile in tiles.forward_tiles(args[0], args[1], args[3].shape[0]) if tile.programs
    ]
    assert len(found) == (8 if args[3].shape[0] <= 16 else 6)
    return found


def check_joint(args, configs=None):
    for config in configs or joint_tiles(args):
        with forced(tiles.OP_NAME, "triton", config) as asked:
            check(*JOINT, args)
            assert asked.keys


@pytest.mark.parametrize(
    "sizes",
    [(1, 16, 1), (2, 48, 3), (127, 64, 255), (129, 80, 257), (650, 320, 712), (70001, 128, 136)],
    ids=str,
)
def test_every_joint_tile_is_right(sizes):
    """Less than a tile, one and a bit, a K of one step and of several, many tiles a program; both
    groups of rows where there are several tiles."""
    args = on_gpu(*sizes, 16, dtype=torch.bfloat16)
    check_joint(args, joint_tiles(args)[:: 1 if sizes[0] > 650 else 2])


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize(
    "sizes",
    [(1, 16, 16), (127, 64, 256), (129, 80, 272), (650, 320, 720), (70001, 128, 144)],
    ids=str,
)
def test_every_joint_tile_of_the_inputs_gradient_is_right(sizes, transposed):
    """S's gradient is given, and the weight read along its columns (rows where transposed)."""
    forward, backward = KERNELS["fused_product"]
    rank = 32 if transposed else 8
    args = on_gpu(*sizes, rank, dtype=torch.bfloat16)
    if transposed:
        args = (args[0], args[1].t().contiguous().t(), *args[2:])
    upstream = upstream_of(args[0].new_empty(sizes[0], sizes[2]))
    found = tiles.backward_tiles(upstream, args[1].t(), rank)
    for config in [config for config in found if config.programs][::2]:
        with forced(tiles.OP_NAME, "triton_backward", config) as asked:
            check(forward, backward, args)
            assert asked.keys


@pytest.mark.parametrize("rank", [1, 2, 3, 8, 15, 17, 31, 32])
def test_joint_ranks(rank):
    args = on_gpu(517, 144, 264, rank, "tanh", torch.bfloat16)
    check_joint(args, joint_tiles(args)[::2])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_joint_activations_and_scales(activation):
    for has_bias, scale in ((True, 0.5), (False, -1.7), (True, 0.0)):
        varied = {"has_bias": has_bias, "scale": scale}
        args = on_gpu(1031, 272, 520, 16, activation, torch.bfloat16, **varied)
        check_joint(args, joint_tiles(args)[:1])


def test_joint_results_repeat_and_a_scale_comes_through_a_pointer():
    args = on_gpu(8195, 512, 520, 8, dtype=torch.bfloat16)
    pointed = (*args[:5], torch.full((), 0.5, device="cuda"), args[6])
    for config in joint_tiles(args):
        with forced(tiles.OP_NAME, "triton", config):
            output = launch.fused_forward(*args)
            assert torch.equal(launch.fused_forward(*args), output)
            assert torch.equal(launch.fused_forward(*pointed), output)


def test_joint_nan_and_infinity_stay_where_eager_has_them():
    for rank, place, at in ((1, 0, (300, 7)), (8, 0, (300, 7)), (1, 4, (5, 0)), (8, 4, (5, 2))):
        for value in (torch.nan, torch.inf):
            args = on_gpu(520, 144, 264, rank, "identity", torch.bfloat16)
            args[place][at] = value
            expected = reference(*args)
            for config in joint_tiles(args):
                with forced(tiles.OP_NAME, "triton", config):
                    output = launch.fused_forward(*args)
                assert torch.equal(output.isnan(), expected.isnan()), config
                assert torch.equal(output.isinf(), expected.isinf()), config


def test_operands_that_maps_cannot_read_take_two_launches():
    args = on_gpu(257, 144, 272, 8, dtype=torch.bfloat16)
    args = (args[0], *laid_out(args[1:], lambda x: x.t().contiguous().t()))
    assert launch._map_layout(args[1]) == "columns"
    check_joint(args)


@pytest.mark.large_memory
def test_adapt_tiles_past_2_to_the_31_elements():
    rows, width = 2**21 + 3, 1032
    _, weight, bias, a, b, scale, _ = on_gpu(1, width, width, 8, dtype=torch.bfloat16)
    x = torch.zeros(rows, width, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(width, device="cuda")
    config = tiles.tile(128, 256, 64, 8, 3, maps=1, programs=1)
    output = launch._adapt(x, weight, bias, None, b, scale, "relu", config, factor=a)
    expected = reference(x[-1:], weight, bias, a, b, scale, "relu")
    torch.testing.assert_close(output[-1:], expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(output[rows // 2], torch.relu(bias))


def test_every_stream_of_the_update_and_every_reduction_is_right():
    args = on_gpu(1031, 264, 520, 16, dtype=torch.bfloat16)
    name = tiles.OP_NAME
    forward, backward = KERNELS["library_product"]
    for config in tiles.update_tiles(520):
        with forced(name, "triton_library", config):
            check(forward, backward, args)
    for activation in ("relu", "gelu"):
        call = (*args[:-1], activation)
        for config in tiles.reductions(upstream_of(forward(*call)), activation):
            with forced(name, "triton_library_backward", config):
                check(forward, backward, call)


@products
def test_float32_obeys_the_setting(product):
    forward, _ = KERNELS[product]
    args = on_gpu(512, 512, 512, 16, "identity")
    exact = reference(*(arg.double() if isinstance(arg, torch.Tensor) else arg for arg in args))

    def error() -> float:
        return ((forward(*args).double() - exact).norm() / exact.norm()).item()

    assert error() < 2e-6
    torch.set_float32_matmul_precision("high")
    try:
        assert 2e-5 < error() < 2e-3
    finally:
        torch.set_float32_matmul_precision("highest")


@products
def test_results_repeat_to_the_bit(product):
    forward, backward = KERNELS[product]
    for rank in (16, 64):
        args = on_gpu(8195, 512, 520, rank, "relu", torch.bfloat16)
        output = forward(*args)
        assert torch.equal(forward(*args), output)
        upstream = upstream_of(output)
        first, second = (backward(ALL, upstream, *save(output, *args)) for _ in range(2))
        for place in (0, 3, 4):
            assert torch.equal(first[place], second[place])


@products
def test_scale_through_a_pointer(product):
    forward, _ = KERNELS[product]
    args = on_gpu(129, 64, 72, 8, dtype=torch.bfloat16)
    pointed = (*args[:5], torch.full((), 0.5, device="cuda"), args[6])
    assert torch.equal(forward(*pointed), forward(*args))


@pytest.mark.parametrize("implementation", OP.implementations)
def test_no_synchronisation_and_a_cuda_graph(implementation):
    x, weight, bias, a, b, scale, activation = on_gpu(2048, 512, 512, 16, dtype=torch.bfloat16)
    leaves = [value.requires_grad_() for value in (x, a, b)]
    call = partial(lora_linear, implementation=implementation)

    def step() -> tuple[torch.Tensor, ...]:
        output = call(x, weight, bias, a, b, scale, activation)
        return output, *torch.autograd.grad(output, leaves, torch.ones_like(output))

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        torch.cuda.set_sync_debug_mode("error")
        try:
            expected = step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for ours, known in zip(captured, expected, strict=True):
        assert torch.equal(ours, known)


@products
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(product):
    """The last row of an input and of an output that pass 2^31 elements, and the sums over them."""
    forward, backward = KERNELS[product]
    rows, inner, columns, rank = 2**21 + 3, 1032, 1032, 8
    _, weight, bias, a, b, scale, _ = on_gpu(1, inner, columns, rank, dtype=torch.bfloat16)
    x = torch.zeros(rows, inner, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(inner, device="cuda")
    args = (x, weight, bias, a, b, scale, "relu")
    output = forward(*args)
    last = (x[-1:], *args[1:])
    torch.testing.assert_close(output[-1:], reference(*last), rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(output[rows // 2], torch.relu(bias))
    upstream = torch.zeros_like(output)
    upstream[-1] = 1
    grads = backward(ALL, upstream, *save(output, *args))
    expected = backward(ALL, upstream[-1:], *save(output[-1:], *last))
    torch.testing.assert_close(grads[0][-1:], expected[0], rtol=2e-2, atol=2e-2)
    assert not grads[0][:-1].any()
    for place in (3, 4):
        torch.testing.assert_close(grads[place], expected[place], rtol=2e-2, atol=2e-2)
