"""softmax and log_softmax of 16-bit rows that clusters of 16 blocks hold (cuda_kernels.cu)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from softmax_cases import assert_backward, assert_forward, special_rows

from fuselab.ops.softmax import cuda_launch
from fuselab.runtime import cuda_driver
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


def check(input: torch.Tensor, form: str, grad: torch.Tensor | None = None) -> None:
    """The forward, and the backward beside it."""
    output = getattr(torch, form)(input, -1)
    if grad is None:
        grad = normal(*input.shape, dtype=input.dtype, seed=1)
    assert_forward(partial(cuda_launch.forward, form=form), input, form=form)
    assert_backward(partial(cuda_launch.backward, form=form), output, grad, form=form)


@pytest.mark.parametrize("width", [131_080, 262_136, 262_144, 262_152, 524_280, 524_288])
@forms
@dtypes
def test_edges(width, dtype, form):
    """Both sides of what a line holds, by vectors; others are test_wide_rows'."""
    check(normal(3, width, dtype=dtype), form)


@forms
@dtypes
def test_strided_rows(dtype, form):
    base = normal(3, 12, 262_160, dtype=dtype)
    for rows in (
        base[0, :, :262_144],  # padded by whole vectors
        base[:, ::2, 8:262_152],  # two batch strides, offset by whole vectors
        base[0, :, 1:262_145],  # offset by part of a vector: element by element
        normal(12, 262_145, dtype=dtype)[:, :262_144],  # so every row is
        base[0, :1, :262_144].expand(40, -1),
    ):
        check(rows, form, grad=rows)


@forms
@dtypes
def test_special_values_stay_in_their_rows(dtype, form):
    """NaN, infinities and rows of -inf between rows of numbers."""
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
def test_nothing_spills(form):
    """Of the tables' kernels for whole rows per cluster; float16's log_softmax spills 14 words."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not cuda_launch.has_clusters(device):
        pytest.skip("needs compute capability 9.0")
    for step, vector, name, width in (
        ("forward", 8, "__nv_bfloat16", 65_536),
        ("forward", 8, "__nv_bfloat16", 262_144),
        ("forward", 4, "float", 16_384),
        ("forward", 4, "float", 262_144),
        ("backward", 8, "__nv_bfloat16", 262_144),
        ("backward", 4, "float", 262_144),
    ):
        config = cuda_launch._configs(step, 16 // vector, width, device)[0]
        if "cluster" not in config:  # of 16, where none finds room
            continue
        types = (form, "kApart", name, name) if step == "forward" else (form, name, name)
        lengths = (vector,) if step == "forward" else (vector, vector)
        expression = cuda_launch._resident(step, types, lengths, config)
        function = cuda_launch.CUDA._ready(expression, device.index, 0)
        registers, local_bytes, _ = cuda_driver.function_resources(function, device.index)
        assert registers <= 64 and local_bytes == 0
