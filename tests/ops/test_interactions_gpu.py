"""The interactions on a GPU: CUDA and Triton over shapes, dtypes, layouts, sizes and memory."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from interaction_cases import (
    SHAPES,
    check,
    check_alone,
    check_output,
    layer,
    layouts,
    moved,
    normal,
    special_vectors,
    vectors,
)

from fuselab.ops import cat_interaction, dot_interaction, outer_interaction_linear
from fuselab.ops.cat_interaction import triton_launch as cat_triton
from fuselab.ops.cat_interaction.op import OP as CAT
from fuselab.ops.dot_interaction import cuda_launch, triton_launch
from fuselab.ops.dot_interaction.op import OP as DOT
from fuselab.ops.outer_interaction_linear import triton_launch as outer_triton
from fuselab.ops.outer_interaction_linear.op import OP as OUTER
from fuselab.runtime import tuning
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
outer_dtypes = pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda dtype: str(dtype)[6:])
launchers = pytest.mark.parametrize(
    "launcher", [cuda_launch, triton_launch], ids=lambda module: module.__name__.split(".")[-1]
)
outer = partial(check, OUTER, outer_triton.forward, outer_triton.backward)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def on_gpu(*values):
    return tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in values)


@launchers
@dtypes
@pytest.mark.parametrize("shape", (*SHAPES, (37, 99, 64), (5, 26, 128), (1000, 26, 16)), ids=str)
def test_dot_shapes(launcher, shape, dtype):
    check(DOT, launcher.forward, launcher.backward, *on_gpu(*vectors(*shape, dtype)), shape[0] % 3)


@launchers
@dtypes
def test_dot_special_values(launcher, dtype):
    check(DOT, launcher.forward, launcher.backward, *on_gpu(*special_vectors(dtype)))


# No vector but the dense one, both sides of a block of 8 and 16 vectors, DLRM's own, the most that
# a warp takes; batches that end within a warp's samples and within a block's.
WARP_SHAPES = (
    *((1, 0, 16), (3, 1, 16), (4, 6, 16), (5, 7, 16), (9, 8, 32), (7, 15, 48), (8, 16, 16)),
    *((33, 30, 16), (65, 31, 16), (37, 26, 16), (1000, 26, 16), (11, 26, 128), (2, 32, 16)),
)


@dtypes
@pytest.mark.parametrize("shape", WARP_SHAPES, ids=str)
def test_dot_every_cuda_configuration(shape, dtype):
    dense, embeddings = on_gpu(*vectors(*shape, dtype))
    for padding in (0, 3):
        _check_every_configuration(dense, embeddings, padding)
    room = torch.empty(shape[0], shape[1] + 2, shape[2] + 4, dtype=dtype, device="cuda")
    spread = room[:, 0, 4:], room[:, 2:, : shape[2]]
    for value, to in zip((dense, embeddings), spread, strict=True):
        to.copy_(value)
    _check_every_configuration(*spread, 1)
    one = dense[:1].expand(shape[0], -1), embeddings[:, :1].expand(-1, shape[1], -1)
    if shape[1]:
        _check_every_configuration(*one, 0)


@dtypes
def test_dot_every_number_of_vectors_that_a_warp_takes(dtype):
    """A backward that reads past the last row of a block faults where shared memory ends there:
    31 samples of 9 vectors of 16 did. Every sample of the last warp is there, or one is not."""
    for tables in range(32):
        for batch in (31, 32):
            inputs = on_gpu(*vectors(batch, tables, 16, dtype))
            check(DOT, cuda_launch.forward, cuda_launch.backward, *inputs)


@dtypes
def test_dot_every_cuda_configuration_on_special_values(dtype):
    dense, embeddings = special_vectors(dtype, 26, 16)
    _check_every_configuration(*on_gpu(dense, embeddings), 0)


def _check_every_configuration(dense, embeddings, padding):
    """Both steps, and upstream gradients that are no neighbouring rows, or begin off a word."""
    batch, tables, width = embeddings.shape
    columns = width + tables * (tables + 1) // 2 + padding
    storage = normal(batch + 1, columns + 1, dtype=dense.dtype, seed=8).cuda()
    packed = storage.flatten()[1 : 1 + batch * columns].view(batch, columns)
    has_warps = dense.dtype != torch.float64 and tables < 32
    has_warps &= width == 16 if dense.dtype == torch.float32 else width % 16 == 0
    run = partial(check, DOT, cuda_launch.forward, cuda_launch.backward, dense, embeddings, padding)
    forward = cuda_launch.configs(dense, embeddings, padding)
    backward = cuda_launch.configs_backward((True, True), packed, dense, embeddings)
    for configs in (forward, backward):
        assert any(config.kernel == "warp" for config in configs) == has_warps
    for config in forward:
        with tuning.forced(DOT.name, "cuda", config):
            run()
    for config in backward:
        with tuning.forced(DOT.name, "cuda_backward", config):
            for upstream in (None, storage[1:, 1:], packed, storage[:1, 1:].expand(batch, columns)):
                run(upstream=upstream)


@launchers
@pytest.mark.parametrize("layout", layouts(9, 5, 8))
def test_dot_layouts(launcher, layout):
    inputs = (moved(tensor) for tensor in layouts(9, 5, 8)[layout])
    check(DOT, launcher.forward, launcher.backward, *inputs)


@launchers
def test_dot_upstream_gradients_of_any_stride(launcher):
    inputs = on_gpu(*vectors(9, 3, 5))
    for upstream in (torch.ones(()).expand(9, 11), normal(11, 9).t(), normal(9, 22)[:, 1::2]):
        check(DOT, launcher.forward, launcher.backward, *inputs, upstream=upstream.cuda())


@launchers
def test_each_gradient_alone(launcher):
    inputs = on_gpu(*vectors(9, 3, 8))
    check_alone(DOT, launcher.forward, launcher.backward, *inputs)
    check_alone(*outer.args, *on_gpu(*layer(70, 3, 8, 33)), "relu")


@launchers
def test_dot_adds_up_in_float32_without_tf32(launcher):
    """TF32 keeps 11 bits: its error on products of 1 + 2^-12 shows at once."""
    dense = torch.full((4, 16), 1 + 2.0**-12, device="cuda")
    output = launcher.forward(dense, dense[:, None].repeat(1, 3, 1), 0)[:, 16:]
    torch.testing.assert_close(output, torch.full_like(output, 16 + 2.0**-7), rtol=1e-6, atol=0)


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_dot_in_a_graph_and_by_plan(implementation):
    """A held launch plan must not outlive the alignment that chose the kernel."""
    storage = normal(64 * 27 * 16 + 16).cuda()
    function = partial(dot_interaction, implementation=implementation)
    for offset in (0, 1, 4, 2, 0):
        embeddings = storage[offset : offset + 64 * 26 * 16].view(64, 26, 16)
        dense = storage[offset : offset + 64 * 16].view(64, 16)
        torch.testing.assert_close(function(dense, embeddings), DOT.reference(dense, embeddings))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(dense, embeddings)
    storage.copy_(normal(storage.numel(), seed=5))
    graph.replay()
    torch.testing.assert_close(output, DOT.reference(dense, embeddings))


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
@pytest.mark.large_memory
def test_dot_more_than_2_to_the_31_elements(implementation):
    batch = 2**31 // 367 + 9
    if torch.cuda.mem_get_info()[0] < 6 * batch * 432 * 2:
        pytest.skip("needs 30 GiB of free GPU memory")
    dense = torch.zeros(batch, 16, dtype=torch.float16, device="cuda")
    embeddings = torch.zeros(batch, 26, 16, dtype=torch.float16, device="cuda")
    for part in (slice(0, 50), slice(-50, None)):
        dense[part], embeddings[part] = on_gpu(*vectors(50, 26, 16, torch.float16))
    inputs = dense.requires_grad_(), embeddings.requires_grad_()
    output = dot_interaction(*inputs, implementation=implementation)
    grads = torch.autograd.grad(output, inputs, output.detach())
    for part in (slice(0, 50), slice(-50, None)):
        few = tuple(value.detach()[part].clone().requires_grad_() for value in inputs)
        expected = DOT.reference(*few)
        torch.testing.assert_close(output[part], expected)
        for ours, true in zip(
            grads, torch.autograd.grad(expected, few, output.detach()[part]), strict=True
        ):
            torch.testing.assert_close(ours[part], true, rtol=4e-3, atol=2e-2)


@dtypes
def test_cat(dtype):
    for shape in ((1, 0, 1), (9, 3, 5), (8, 3, 129), (70_000, 26, 16)):
        inputs = on_gpu(*vectors(*shape, dtype))
        check_output(CAT, cat_triton.forward, *inputs)
    ours = cat_interaction(*inputs, implementation="triton")
    assert torch.equal(ours, torch.cat([inputs[0], inputs[1].flatten(1)], 1))


@outer_dtypes
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 0, 1, 1), (3, 1, 2, 3), (2, 2, 5, 2), (3, 0, 16, 2), (3, 0, 17, 2), (2, 4, 7, 3)),
        *((127, 1, 16, 129), (129, 2, 16, 255), (257, 4, 13, 257), (64, 26, 16, 32)),
    ],
    ids=str,
)
def test_outer_shapes(shape, dtype):
    outer(*on_gpu(*layer(*shape, dtype)), "identity")


@outer_dtypes
def test_outer_past_every_tile(dtype):
    """In rows and columns, and a row of pairs that every program shares."""
    outer(*on_gpu(*layer(300, 4, 16, 290, dtype)), "identity")


@outer_dtypes
@pytest.mark.parametrize("activation", ["relu", "leaky_relu", "gelu", "sigmoid", "tanh", "silu"])
def test_outer_activations(activation, dtype):
    outer(*on_gpu(*layer(40, 2, 5, 9, dtype)), activation)


def test_outer_adds_many_samples_up_in_blocks():
    """Emulated, the squares of these samples are off by 18.6 ulp in one chain, 1.6 in blocks of 16;
    on an H200 another draw was off by 17 in one chain, where cuBLAS is by 2.7."""
    inputs = on_gpu(*layer(2047, 1, 2, 2))
    upstream = torch.tensor(1.4637, device="cuda").expand(2047, 2)
    needs = (False, False, True, False)
    saved = OUTER.gradient.save(None, *inputs, "identity")
    ours = outer_triton.backward(needs, upstream, *saved)[2]
    wide = [value.double() if isinstance(value, torch.Tensor) else value for value in saved]
    exact = OUTER.gradient.reference(needs, upstream.double(), *wide)[2]
    ulp = torch.finfo(torch.float32).eps * 2 ** exact.abs().max().log2().floor()
    error = (ours - exact).abs().max() / ulp
    assert error < 6, f"{error:.1f} ulp"


@pytest.fixture
def tf32():
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("shape", [(3, 0, 16, 8), (129, 2, 16, 252), (64, 26, 16, 32)], ids=str)
def test_outer_tf32(shape, tf32):
    """Against TF32 of cuBLAS, whose operands have 11 bits: 2^-11 of each product, and no more.
    Outputs are multiples of 4: of 255 cuBLAS takes the weight's gradient in float32."""
    outer(*on_gpu(*layer(*shape)), "identity")


def test_outer_tf32_rounds_to_nearest(tf32):
    """Of positive terms every sum would be off to one side, by about 2^-10 of it, were bits cut off
    two operands."""
    args = tuple(tensor.abs() for tensor in on_gpu(*layer(130, 2, 16, 255)))
    upstream = normal(130, 255, seed=9).abs().cuda()

    def step(forward, backward, *inputs, upstream):
        output = forward(*inputs, "identity")
        saved = OUTER.gradient.save(output, *inputs, "identity")
        return output, *backward((True,) * 4, upstream, *saved)

    ours = step(outer_triton.forward, outer_triton.backward, *args, upstream=upstream)
    exact = [value.double() for value in args]
    true = step(OUTER.reference, OUTER.gradient.reference, *exact, upstream=upstream.double())
    for mine, expected in zip(ours, true, strict=True):
        bias = ((mine.double() - expected) / expected).mean().abs()
        assert bias < 2**-13, f"{tuple(mine.shape)} {bias:.2e}"


@outer_dtypes
@pytest.mark.parametrize("tables", [0, 1, 3])
def test_outer_special_values(dtype, tables):
    dense, embeddings = special_vectors(dtype, max(tables, 2), 2)
    _, _, weight, bias = layer(1, tables, 2, 5, dtype)
    outer(*on_gpu(dense, embeddings[:, :tables], weight, bias), "identity")
    dense, embeddings, weight, bias = layer(6, tables, 2, 5, dtype)
    for place in (0, 1):
        dense[place, place] = torch.finfo(dtype).max
    inputs = on_gpu(dense, embeddings, weight * 4, bias)
    check_output(OUTER, outer_triton.forward, *inputs, "identity")


def test_outer_layouts():
    _, _, weight, bias = layer(1, 2, 4, 4)
    for inputs in layouts(9, 2, 4).values():
        outer(*(moved(tensor) for tensor in inputs), *on_gpu(weight, bias), "identity")
    inputs = on_gpu(*vectors(9, 2, 4), normal(4, 150)[:, 2:146], bias)
    outer(*inputs, "identity", upstream=torch.ones((), device="cuda").expand(9, 4))


def test_outer_repeats_to_the_bit():
    inputs = on_gpu(*layer(300, 26, 16, 64, torch.bfloat16))
    first = outer_triton.forward(*inputs, "relu")
    upstream = normal(300, 64, dtype=torch.bfloat16, seed=7).cuda()
    saved = OUTER.gradient.save(first, *inputs, "relu")
    grads = outer_triton.backward((True,) * 4, upstream, *saved)
    for _ in range(5):
        assert torch.equal(outer_triton.forward(*inputs, "relu"), first)
        for again, grad in zip(
            outer_triton.backward((True,) * 4, upstream, *saved), grads, strict=True
        ):
            assert torch.equal(again, grad)


@pytest.mark.parametrize("implementation", ["triton", "wgmma"])
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_outer_memory_at_the_published_size(activation, implementation):
    """Above inputs, parameters and gradients at most a tenth of what the plain layer's forward
    takes, with a backward too, and where that computes the pre-activation again."""
    inputs = on_gpu(*layer(2048, 26, 16, 512, torch.bfloat16))

    def peak(function, backward: bool) -> int:
        for tensor in inputs:
            tensor.requires_grad_(backward)
        for _ in range(2):  # the first one builds
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            output, grads = function(*inputs, activation), ()
            if backward:
                grads = torch.autograd.grad(output, inputs, torch.ones_like(output))
            needed = sum(tensor.numel() * tensor.element_size() for tensor in (output, *grads))
            result = torch.cuda.max_memory_allocated() - before - needed
            del output, grads
        return result

    ours = partial(outer_interaction_linear, implementation=implementation)
    plain = peak(OUTER.reference, False)
    for backward in (False, True):
        taken = peak(ours, backward)
        assert taken <= 0.1 * plain, f"{taken / 2**20:.0f} MiB of {plain / 2**20:.0f}"


def test_outer_in_a_graph():
    inputs = on_gpu(*layer(64, 2, 16, 33, torch.bfloat16))
    function = partial(outer_interaction_linear, implementation="triton")
    function(*inputs, "relu")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = function(*inputs, "relu")
    inputs[0].copy_(normal(64, 16, dtype=torch.bfloat16, seed=6))
    graph.replay()
    torch.testing.assert_close(
        output.float(), OUTER.reference(*inputs, "relu").float(), rtol=0.02, atol=0.05
    )
