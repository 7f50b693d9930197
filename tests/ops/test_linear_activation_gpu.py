"""The Triton and CUDA kernels of linear_activation on a GPU."""

from __future__ import annotations

import pytest
import torch
from linear_cases import LAYOUTS, SHAPES, check, operands
from pointwise_cases import assert_within_bar

from fuselab.ops import linear_activation
from fuselab.ops._shared import matrices
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.linear_activation import cublaslt_launch, cuda_launch, triton_launch
from fuselab.ops.linear_activation.op import OP
from fuselab.ops.linear_activation.reference import gradient, reference
from fuselab.runtime.fallback import strict
from fuselab.runtime.tuning import forced

pytestmark = pytest.mark.gpu

KERNELS = {
    "triton": (triton_launch.forward, triton_launch.backward),
    "cuda": (cuda_launch.forward, cuda_launch.backward),
}
implementations = pytest.mark.parametrize("implementation", KERNELS)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])


def depths(implementation: str, activation: str, dtype: torch.dtype) -> tuple[int, ...]:
    """Every kernel with every activation, and whole blocks of the depth with one; float16 differs
    from bfloat16 in the casts alone, which one kernel shows."""
    shallow, deep = ((13, 31), (200, 256)) if activation == "gelu" else ((13,), (200,))
    return shallow if implementation == "cuda" or dtype == torch.float16 else shallow + deep


@implementations
@dtypes
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_dtypes(implementation, activation, dtype):
    for depth in depths(implementation, activation, dtype):
        args = operands(1031, depth, 136, dtype, "cuda")
        check(*KERNELS[implementation], *args, activation)


@implementations
@dtypes
@pytest.mark.parametrize(
    "shape", [*SHAPES, (10_007, 13, 512), (4099, 9, 257), (1, 32, 4099), (513, 1, 1)], ids=str
)
def test_shapes(implementation, dtype, shape):
    if implementation == "cuda" and shape[1] > 32:
        pytest.skip("the CUDA kernels end at a depth of 32")
    for bias in (True, False) if dtype == torch.bfloat16 else (True,):
        check(*KERNELS[implementation], *operands(*shape, dtype, "cuda", bias=bias))


@pytest.mark.parametrize(
    "shape", [(2048, 2048, 2048), (4096, 1000, 777), (100, 4097, 300)], ids=str
)
@dtypes
def test_large_products(dtype, shape):
    check(*KERNELS["triton"], *operands(*shape, dtype, "cuda"))


@pytest.mark.parametrize("activation", ["identity", "relu", "silu"])
def test_depths_that_the_library_gets_padded(activation):
    """Large 16-bit products of a depth that is no multiple of 8, forward and backward."""
    input, weight, bias = operands(4100, 367, 1024, torch.bfloat16, "cuda")
    (padded,) = matrices.depth_aligned(4100, 1024, input)
    assert padded.shape == (4100, 368) and torch.equal(padded[:, :367], input)
    assert matrices.depth_aligned(41, 1024, input)[0] is input
    check(cublaslt_launch.forward, cublaslt_launch.backward, input, weight, bias, activation)


@implementations
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(implementation, layout):
    large = 32 if implementation == "cuda" else 130
    for size, dtype, activation in (
        (24, torch.float32, "gelu"),
        (24, torch.bfloat16, "relu"),
        (large, torch.float32, "relu"),
        (large, torch.bfloat16, "gelu"),
    ):
        input, weight, bias = operands(size, size, size, dtype, "cuda")
        upstream = LAYOUTS[layout](operands(size, size, size, dtype, "cuda")[1])
        input, weight = LAYOUTS[layout](input), LAYOUTS[layout](weight)
        bias = bias.repeat_interleave(2)[::2]
        args = (*KERNELS[implementation], input, weight, bias)
        check(*args, activation, upstreams=(upstream,))


@implementations
def test_unaligned_operands(implementation):
    def shifted(tensor):
        return torch.nn.functional.pad(tensor.flatten(), (1, 0))[1:].view(tensor.shape)

    for depth in (16, 32) if implementation == "cuda" else (16, 128):
        input, weight, bias = operands(300, depth, 64, torch.bfloat16, "cuda")
        check(*KERNELS[implementation], shifted(input), shifted(weight), shifted(bias))


def test_the_shallow_kernel_of_16_bits():
    """Its edges: 16 rows, 8, 64 and 512 columns, 16 and 32 deep, any layout; then many rows."""
    kernels = KERNELS["cuda"]
    for place, depth in enumerate((1, 12, 13, 16, 17, 31, 32)):
        for columns in (1, 8, 63, 64, 65, 72, 128, 136, 200, 512, 520, 1100):
            rows = (1, 15, 16, 17, 63, 64, 65)[(place + columns) % 7]
            dtype = (torch.float16, torch.bfloat16)[columns % 2 ^ place % 2]
            check(*kernels, *operands(rows, depth, columns, dtype, "cuda", bias=rows != 16))
    for activation in ("identity", "gelu", "tanh"):
        check(*kernels, *operands(1031, 13, 136, torch.bfloat16, "cuda"), activation)
    for layout in LAYOUTS.values():
        for size in (16, 32):
            input, weight, bias = operands(size, size, size, torch.bfloat16, "cuda")
            bias = bias.repeat_interleave(2)[::2]
            check(*kernels, layout(input), layout(weight), bias)
    for shape in (
        (10_007, 13, 512),
        (70_001, 13, 512),
        (70_001, 31, 64),
        (200_001, 7, 200),
        (1, 16, 4099),
    ):
        args = operands(*shape, torch.bfloat16, "cuda")
        exact, eager = reference(*(value.double() for value in args)), reference(*args)
        assert_within_bar(kernels[0](*args, "relu"), eager, exact, str(shape))
        again = kernels[0](args[0].reshape(1, *args[0].shape), *args[1:], "relu")
        assert torch.equal(again[0], kernels[0](*args, "relu"))
        apart = [torch.stack((value, value), -1)[..., 0] for value in args[:2]]
        assert torch.equal(kernels[0](*apart, args[2], "relu"), again[0])


def test_infinities_stay_in_their_rows_and_columns():
    """Rows lie one behind another where a product reads whole steps of the depth."""
    for depth in (13, 31):
        input, weight, bias = operands(40, depth, 136, torch.bfloat16, "cuda")
        input[5], input[39, 2], weight[9], weight[135, 0] = *[float("inf")] * 3, float("nan")
        bias[64] = -float("inf")
        ours = cuda_launch.forward(input, weight, bias, "relu")
        eager = reference(input, weight, bias)
        exact = reference(*(value.double() for value in (input, weight, bias)))
        assert_within_bar(ours, eager, exact, str(depth))
        others = torch.ones(40, 136, dtype=torch.bool, device="cuda")
        others[[5, 39]] = others[:, [9, 64, 135]] = False
        assert ours[others].isfinite().all()


@pytest.mark.parametrize("depth", [13, 32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_candidate_of_tuning_is_right(dtype, depth):
    """Every tile; the order of tiles with ``group`` rows of them, once each."""
    args = (*operands(1031, depth, 520, dtype, "cuda"), "relu")
    exact = reference(*(value.double() for value in args[:3]))
    eager = (reference(*args).double() - exact).abs().max()
    ulp = torch.finfo(dtype).eps * exact.abs().max()
    for implementation, launcher in (("triton", triton_launch), ("cuda", cuda_launch)):
        if implementation == "cuda" and depth > 32:
            continue
        grouped = set()
        for config in OP.configs[implementation](*args):
            group = config.get("group", 8)
            if group != 8 and group in grouped:
                continue
            grouped.add(group)
            error = (launcher.forward(*args, config).double() - exact).abs().max()
            assert error <= 4 * eager + 2 * ulp, config


def test_every_candidate_of_the_backward_is_right():
    """Kernel after kernel, each in the next dtype; ``programs`` is the grid's alone."""
    kernels: dict[tuple[int, int, int], int] = {}
    for place, dtype in enumerate(DTYPES):
        args = operands(1031, 13, 520, dtype, "cuda")
        output = reference(*args)
        saved = (*args[:2], None, "relu")
        needs, upstream = (True, True, True), torch.randn_like(output)
        theirs = gradient(
            needs, upstream.double(), output.double(), *(v.double() for v in args[:2]), *saved[2:]
        )
        eager = gradient(needs, upstream, output, *saved)
        for config in OP.configs["triton_backward"](needs, upstream, output, *saved):
            kernel = (config.rows, config.columns, config.warps)
            if kernels.setdefault(kernel, len(kernels)) % len(DTYPES) != place:
                continue
            with forced(OP.name, "triton_backward", config):
                ours = triton_launch.backward(needs, upstream, output, *saved)
            for one, other, exact in zip(ours, eager, theirs, strict=True):
                assert_within_bar(one, other, exact, str(config))


@pytest.mark.parametrize("depth", [13, 200])
def test_float32_obeys_the_precision_setting(depth):
    args = operands(512, depth, 256, torch.float32, "cuda")
    exact = reference(*(value.double() for value in args), "identity")
    before = torch.get_float32_matmul_precision()
    errors = {}
    try:
        for precision in ("highest", "high", "highest"):
            torch.set_float32_matmul_precision(precision)
            ours = linear_activation(*args, "identity", implementation="triton")
            errors[precision] = (ours.double() - exact).abs().max()
    finally:
        torch.set_float32_matmul_precision(before)
    assert errors["highest"] < 1e-5 < errors["high"] < 1e-2


@implementations
def test_sums_repeat_to_the_bit(implementation):
    _, backward = KERNELS[implementation]
    input, weight, bias = operands(30_001, 13, 129, torch.float32, "cuda")
    output = reference(input, weight, bias)
    first, second = (
        backward(
            (False, implementation == "triton", True), output, output, input, weight, None, "relu"
        )
        for _ in range(2)
    )
    assert torch.equal(first[2], second[2])
    assert first[1] is None or torch.equal(first[1], second[1])


@implementations
def test_runs_on_the_callers_stream_and_in_a_graph(implementation):
    for depth in (13,) if implementation == "cuda" else (13, 128):
        args = operands(640, depth, 128, torch.bfloat16, "cuda")
        leaves = [value.requires_grad_() for value in args]

        def step(leaves=leaves):
            output = linear_activation(*leaves, implementation=implementation)
            return output, *torch.autograd.grad(output.sum(), leaves)

        with strict():
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                step()
            stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                results = step()
        with torch.no_grad():
            leaves[0].copy_(operands(641, depth, 128, torch.bfloat16, "cuda")[0][1:])
        graph.replay()
        for ours, theirs in zip(results, step(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_calls_that_hit_a_launch_plan_see_alignment_and_shape():
    storage = torch.randn(8 * 64 + 16, device="cuda").bfloat16()
    _, weight, bias = operands(8, 16, 24, torch.bfloat16, "cuda")
    for offset in (0, 8, 1, 2, 0, 3):
        input = storage[offset : offset + 512].view(32, 16)
        for implementation in KERNELS:
            ours = linear_activation(input, weight, bias, implementation=implementation)
            torch.testing.assert_close(ours, reference(input, weight, bias))


@implementations
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation):
    """Offsets past 32 bits in the output, and in the gradient of the weight's operands."""
    columns = 512
    rows = 2**31 // columns + 67
    if torch.cuda.mem_get_info()[0] < 4 * 2 * rows * columns:
        pytest.skip(f"needs {8 * rows * columns / 2**30:.0f} GiB of free GPU memory")
    _, weight, bias = operands(1, 13, columns, torch.bfloat16, "cuda")
    input = torch.zeros(rows, 13, device="cuda", dtype=torch.bfloat16)
    input[-70:] = 1
    with strict():
        ours = linear_activation(input, weight, bias, implementation=implementation)
    torch.testing.assert_close(ours[-70:], reference(input[-70:], weight, bias))
    torch.testing.assert_close(ours[:3], reference(input[:3], weight, bias))
    saved = ours, input, weight, None, "relu"
    grads = KERNELS[implementation][1]((False, True, False), ours, *saved)
    last = reference(input[-70:], weight, bias).double()
    torch.testing.assert_close(
        grads[1].double(), (last.t() @ input[-70:].double()), rtol=0.02, atol=0.5
    )
