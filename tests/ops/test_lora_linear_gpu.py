"""The Triton kernels of lora_linear on a GPU: every dtype, tensor maps, wide offsets."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from lora_cases import ALL, RANKS, check, laid_out, operands, upstream_of
from pointwise_cases import LAYOUTS

from fuselab.ops import lora_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.lora_linear import configs, triton_launch
from fuselab.ops.lora_linear.op import OP
from fuselab.ops.lora_linear.reference import reference
from fuselab.runtime.fallback import strict
from fuselab.runtime.tuning import Config

pytestmark = pytest.mark.gpu

KERNELS = (triton_launch.forward, triton_launch.backward)
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.bfloat16], ids=lambda dtype: str(dtype)[6:]
)
on_gpu = partial(operands, device="cuda")


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes(dtype, activation):
    check(*KERNELS, on_gpu(1031, 264, 520, 16, activation, dtype))


@pytest.mark.parametrize(
    ("rank", "dtype"),
    [
        *((rank, torch.bfloat16) for rank in (*RANKS, 128, 200)),
        *((rank, torch.float32) for rank in (1, 3, 16, 33, 128)),
        *((rank, torch.float16) for rank in (3, 33)),
    ],
    ids=str,
)
def test_ranks(rank, dtype):
    check(*KERNELS, on_gpu(517, 136, 264, rank, "tanh", dtype))


@pytest.mark.parametrize(
    "sizes",
    [(1, 1, 1), (2, 3, 5), (63, 65, 127), (129, 257, 255), (4099, 64, 72), (33, 4104, 40)],
    ids=str,
)
def test_sizes(sizes):
    for dtype in (torch.float32, torch.bfloat16):
        check(*KERNELS, on_gpu(*sizes, 16, "relu", dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout):
    args = laid_out(on_gpu(257, 130, 264, 8, dtype=torch.bfloat16), LAYOUTS[layout])
    upstream = LAYOUTS[layout](upstream_of(args[0].new_empty(257, 264)))
    check(*KERNELS, args, upstream)


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
    for config in configs.HALF:
        for maps in (1,) if transposed else (0, 1):
            tile = Config(**{**config, "maps": maps})
            ours = triton_launch.product(*operands, scale, activation, tile)
            assert bool(((ours.double() - exact).abs() <= ulp).all()), tile


def reference_of_product(x, weight, bias, projection, up, scale):
    return torch.relu(x @ weight.t() + bias + scale * projection @ up.t())


def test_float32_obeys_the_setting():
    forward = triton_launch.forward
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


def test_results_repeat_to_the_bit():
    forward, backward = KERNELS
    for rank in (16, 64):
        args = on_gpu(8195, 512, 520, rank, "relu", torch.bfloat16)
        output = forward(*args)
        assert torch.equal(forward(*args), output)
        upstream = upstream_of(output)
        first, second = (backward(ALL, upstream, *save(output, *args)) for _ in range(2))
        for place in (0, 3, 4):
            assert torch.equal(first[place], second[place])


def test_scale_through_a_pointer():
    forward = triton_launch.forward
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


@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements():
    """The last row of an input and of an output that pass 2^31 elements, and the sums over them."""
    forward, backward = KERNELS
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
