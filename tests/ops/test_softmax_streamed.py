"""softmax and log_softmax by clusters that stay and take row after row (cuda_kernels.cu)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from softmax_cases import assert_backward, assert_forward, special_rows

from fuselab.ops.softmax import cuda_launch
from fuselab.runtime import cuda_driver, gpu_limits
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu
forms = pytest.mark.parametrize("form", ["softmax", "log_softmax"])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Made on the GPU: some of these inputs hold 20 million elements. Every row has a mean and a
    spread of its own, so that nothing of one passes for the next one's."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cuda")
    row = torch.arange(shape[0], device="cuda").view(-1, *[1] * (len(shape) - 1))
    return (values * (1 + row % 5) + 3 * (row % 7)).to(dtype)


def is_streamed(input: torch.Tensor) -> bool:
    return "streamed" in cuda_launch.configs(input, -1, None)[0]


def check(input: torch.Tensor, form: str, grad: torch.Tensor | None = None) -> None:
    """The forward, and the backward beside it: a row per cluster."""
    output = getattr(torch, form)(input, -1)
    if grad is None:
        grad = normal(*input.shape, dtype=input.dtype, seed=1)
    assert_forward(partial(cuda_launch.forward, form=form), input, form=form)
    assert_backward(partial(cuda_launch.backward, form=form), output, grad, form=form)


@pytest.mark.parametrize("width", [131_080, 262_136, 262_144, 262_152, 524_280, 524_288])
@forms
@dtypes
def test_edges(width, dtype, form):
    """Both sides of what 8 and 16 blocks hold, by vectors; others are test_wide_rows'."""
    device = torch.device("cuda", torch.cuda.current_device())
    input = normal(3, width, dtype=dtype)
    largest = cuda_launch._largest_cluster(width, device)
    assert is_streamed(input) == (largest > 1 and width <= largest * 32_768)
    check(input, form)


@forms
@dtypes
@pytest.mark.parametrize("rows, width", [(1, 262_144), (17, 262_144), (85, 262_136), (31, 524_288)])
def test_row_after_row(rows, width, dtype, form):
    """More rows than clusters that run at a time, five times over: mailboxes are reused."""
    check(normal(rows, width, dtype=dtype), form)


@forms
@dtypes
def test_strided_rows(dtype, form):
    base = normal(3, 12, 262_160, dtype=dtype)
    for rows in (
        base[0, :, :262_144],  # padded by whole vectors
        base[:, ::2, 8:262_152],  # two batch strides, offset by whole vectors
        base[0, :, 1:262_145],  # offset by part of a vector: not streamed
        normal(12, 262_145, dtype=dtype)[:, :262_144],  # so every row is
        base[0, :1, :262_144].expand(40, -1),
    ):
        check(rows, form, grad=rows)


@forms
@dtypes
def test_special_values_stay_in_their_rows(dtype, form):
    """NaN, infinities and rows of -inf: each cluster meets them between rows of numbers."""
    rows = special_rows(dtype, 262_144).cuda().repeat(7, 1)
    check(rows, form, grad=normal(*rows.shape, dtype=dtype, seed=1))


@forms
@dtypes
def test_the_same_row_gives_the_same_bits_wherever_and_whenever(dtype, form):
    input = normal(1, 262_144, dtype=dtype).repeat(70, 1)
    first = cuda_launch.forward(input, -1, None, form)
    assert torch.equal(first, first[:1].expand_as(first))
    for _ in range(20):
        assert torch.equal(cuda_launch.forward(input, -1, None, form), first)


@forms
@dtypes
def test_in_place(dtype, form):
    input = normal(70, 262_144, dtype=dtype)
    written = input.clone()
    cuda_launch.forward_in_place(written, -1, form)
    assert torch.equal(written, cuda_launch.forward(input, -1, None, form))


@forms
@dtypes
def test_in_a_graph(dtype, form):
    input, grad = (normal(40, 262_144, dtype=dtype, seed=seed) for seed in (0, 1))

    def both() -> tuple[torch.Tensor, torch.Tensor]:
        output = cuda_launch.forward(input, -1, None, form)
        (gradient,) = cuda_launch.backward((True,), grad, output, -1, dtype, form)
        return output, gradient

    both()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = both()
    input.copy_(normal(40, 262_144, dtype=dtype, seed=2))
    expected = both()
    for _ in range(3):
        for result in captured:
            result.zero_()
        graph.replay()
        for ours, exact in zip(captured, expected, strict=True):
            assert torch.equal(ours, exact)


@pytest.mark.parametrize("form", ["kSoftmax", "kLogSoftmax"])
def test_clusters_that_run_at_a_time(form):
    """The grid's bound: at least one, and no more than the multiprocessors have room for. Nothing
    spills, and so it is with the kernels of the tables for whole rows per cluster."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not cuda_launch._has_clusters(device):
        pytest.skip("needs compute capability 9.0")
    multiprocessors = gpu_limits.multiprocessors(device)
    for step, vector, name, width in (
        ("forward", 8, "__nv_bfloat16", 65_536),
        ("forward", 8, "__nv_bfloat16", 262_144),
        ("forward", 4, "float", 262_144),
        ("backward", 8, "__nv_bfloat16", 262_144),
        ("backward", 4, "float", 262_144),
    ):
        config = cuda_launch._configs(step, 16 // vector, width, device)[0]
        if "cluster" not in config:  # of 16, where none finds room
            continue
        types = (form, "kApart", name, name) if step == "forward" else (form, name, name)
        lengths = (vector,) if step == "forward" else (vector, vector)
        expression, shared_bytes = cuda_launch._resident(step, types, lengths, config), 0
        if "streamed" in config:
            expression = cuda_launch._streamed(types, config)
            shared_bytes = config.threads * config.elements * 2
        count = cuda_launch._active_clusters(expression, config, shared_bytes, device)
        assert 1 <= count <= multiprocessors * config.blocks // config.cluster
        function = cuda_launch.CUDA._ready(expression, device.index, shared_bytes)
        registers, local_bytes, _ = cuda_driver.function_resources(function, device.index)
        assert registers <= 64 and local_bytes == 0
