"""softmax and log_softmax by clusters that stay and take row after row (cuda_kernels.cu)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from softmax_cases import assert_backward, assert_forward, special_rows

from fuselab.ops.softmax import cuda_launch
from fuselab.runtime import cuda_driver, gpu_limits, tuning
from fuselab.runtime.fallback import strict
from fuselab.runtime.tuning import Config

forms = pytest.mark.parametrize("form", ["softmax", "log_softmax"])
dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:]
)
# Both sides of what 8 and 16 blocks hold, of a vector (8 or 4 elements), and of the narrowest line.
EDGES = (65535, 65536, 65537, 65544, 131072, 131073, 131080, 262136, 262143, 262144, 262145, 262152)
EDGES += (524280, 524288, 524289)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


# What is offered, without a GPU


@pytest.fixture
def hopper(monkeypatch):
    """The limits of an H200 for ``_configs``; the value says whether clusters of 16 find room."""
    room = {"clusters of 16": True, "shared": 232_448}
    monkeypatch.setattr(cuda_launch, "_has_clusters", lambda device: True)
    monkeypatch.setattr(cuda_launch, "_has_clusters_of_16", lambda device: room["clusters of 16"])
    monkeypatch.setattr(gpu_limits, "shared_bytes", lambda device: room["shared"])
    cuda_launch._configs.cache_clear()
    yield room
    cuda_launch._configs.cache_clear()


def offered(step: str, itemsize: int, width: int) -> tuple[Config, ...]:
    cuda_launch._configs.cache_clear()
    return cuda_launch._configs(step, itemsize, width, torch.device("cuda", 0))


def test_streamed_rows_are_the_default_where_one_row_per_block_missed_the_target(hopper):
    for step, itemsize, cluster in (("forward", 2, 8), ("backward", 2, 8), ("backward", 4, 16)):
        default = offered(step, itemsize, 262_144)[0]
        assert default.get("streamed") == 1 and default.cluster == cluster
    # float32's forward is at the ceiling with blocks that take one row.
    assert "streamed" not in offered("forward", 4, 262_144)[0]


def test_blocks_offered_fit_a_multiprocessor(hopper):
    for step in ("forward", "backward"):
        for itemsize in (2, 4):
            for width in EDGES:
                for config in offered(step, itemsize, width):
                    if "streamed" in config:
                        assert config.threads * config.elements * config.cluster >= width
                        assert config.threads * config.blocks <= 1024  # 64 registers each
                        shared = cuda_launch._shared_bytes(step, itemsize, config) + 2048
                        assert shared * config.blocks <= 228 * 1024


def test_rings_are_offered_where_one_row_ahead_missed_the_target(hopper):
    for step, itemsize in (("forward", 2), ("backward", 2), ("backward", 4)):
        rings = [config for config in offered(step, itemsize, 262_144) if "stages" in config]
        # 32 KB each: all of an SM's 227 KB for one block, half of it for each of two.
        assert {config.blocks: config.stages for config in rings}.items() <= {1: 7, 2: 3}.items()
        assert 1 <= len(rings) <= 3
    assert all("stages" not in config for config in offered("forward", 4, 262_144))


def test_without_room_for_16_blocks_the_default_is_pieces(hopper):
    hopper["clusters of 16"] = False
    configs = offered("backward", 4, 262_144)
    assert all(config.get("cluster") != 16 for config in configs)
    assert "piece" in configs[0]


def test_blocks_larger_than_shared_memory_are_left_out(hopper):
    hopper["shared"] = 101_376  # compute capability 12.0
    assert offered("forward", 2, 262_144)[0].get("streamed") == 1  # 64 KB
    for itemsize in (2, 4):
        for config in offered("backward", itemsize, 262_144):
            assert "streamed" not in config or config.threads == 512  # 64 KB; of 1024 threads 128


@pytest.mark.parametrize("width, dtype, whole", [(64, torch.float32, True), (66, None, False)])
def test_only_whole_vectors_are_streamed(width, dtype, whole):
    input = torch.empty(3, width)
    rows = cuda_launch.Rows(3, width, 1, width, 0, 1, columns=False)
    tensors = (input, torch.empty_like(input))
    vectors = cuda_launch._vectors("forward", rows, tensors)
    assert cuda_launch._are_whole_vectors(vectors, tensors) is whole
    mixed = (input.bfloat16(), torch.empty_like(input))
    assert not cuda_launch._are_whole_vectors((4,), mixed)


# The kernels


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Made on the GPU: some of these inputs hold 20 million elements. Every row has a mean and a
    spread of its own, so that nothing of one passes for the next one's."""
    generator = torch.Generator("cuda").manual_seed(seed)
    values = torch.randn(shape, generator=generator, device="cuda")
    row = torch.arange(shape[0], device="cuda").view(-1, *[1] * (len(shape) - 1))
    return (values * (1 + row % 5) + 3 * (row % 7)).to(dtype)


def streams(configs) -> list[Config]:
    return [config for config in configs if "streamed" in config]


def check_all(input: torch.Tensor, form: str, grad: torch.Tensor | None = None) -> None:
    """Forward and backward as chosen, and by every streamed candidate."""
    output = getattr(torch, form)(input, -1)
    if grad is None:
        grad = normal(*input.shape, dtype=input.dtype, seed=1)
    assert_forward(partial(cuda_launch.forward, form=form), input, form=form)
    assert_backward(partial(cuda_launch.backward, form=form), output, grad, form=form)
    for config in streams(cuda_launch.configs(input, -1, None)):
        with tuning.forced(f"fuselab::{form}", "cuda", config):
            assert_forward(partial(cuda_launch.forward, form=form), input, form=form)
    for config in streams(cuda_launch.configs_backward((True,), grad, output, -1, input.dtype)):
        with tuning.forced(f"fuselab::{form}", "cuda_backward", config):
            assert_backward(partial(cuda_launch.backward, form=form), output, grad, form=form)


@pytest.mark.gpu
@forms
@dtypes
@pytest.mark.parametrize("width", EDGES)
def test_edges(width, dtype, form):
    check_all(normal(3, width, dtype=dtype), form)


@pytest.mark.gpu
@forms
@dtypes
@pytest.mark.parametrize("rows, width", [(1, 262_144), (17, 262_144), (85, 262_136), (270, 65_536)])
def test_row_after_row(rows, width, dtype, form):
    """More rows than clusters that run at a time, five times over: mailboxes are reused."""
    check_all(normal(rows, width, dtype=dtype), form)


@pytest.mark.gpu
@forms
@dtypes
def test_strided_rows(dtype, form):
    base = normal(3, 12, 131_088, dtype=dtype)
    for rows in (
        base[0, :, :131_072],  # padded by whole vectors
        base[:, ::2, 8:131_080],  # two batch strides, offset by whole vectors
        base[0, :, 1:131_073],  # offset by part of a vector: not streamed
        normal(12, 131_073, dtype=dtype)[:, :131_072],  # so every row is
        base[0, :1, :131_072].expand(40, -1),
    ):
        check_all(rows, form, grad=rows)


@pytest.mark.gpu
@forms
@dtypes
@pytest.mark.parametrize("width", [65_536, 262_144])
def test_special_values_stay_in_their_rows(width, dtype, form):
    """NaN, infinities and rows of -inf: each cluster meets them between rows of numbers."""
    rows = special_rows(dtype, width).cuda().repeat(7, 1)
    check_all(rows, form, grad=normal(*rows.shape, dtype=dtype, seed=1))


@pytest.mark.gpu
@forms
@dtypes
def test_the_same_row_gives_the_same_bits_wherever_and_whenever(dtype, form):
    input = normal(1, 262_144, dtype=dtype).repeat(70, 1)
    grad = normal(1, 262_144, dtype=dtype, seed=1).repeat(70, 1)
    output = cuda_launch.forward(input, -1, None, form)

    def backward() -> torch.Tensor:
        return cuda_launch.backward((True,), grad, output, -1, dtype, form)[0]

    def forward() -> torch.Tensor:
        return cuda_launch.forward(input, -1, None, form)

    backward_configs = cuda_launch.configs_backward((True,), grad, output, -1, dtype)
    for name, call, configs in (
        ("cuda", forward, cuda_launch.configs(input, -1, None)),
        ("cuda_backward", backward, backward_configs),
    ):
        for config in streams(configs):
            with tuning.forced(f"fuselab::{form}", name, config):
                first = call()
                assert torch.equal(first, first[:1].expand_as(first))
                for _ in range(20):
                    assert torch.equal(call(), first)


@pytest.mark.gpu
@forms
@dtypes
def test_in_place(dtype, form):
    input = normal(70, 262_144, dtype=dtype)
    for config in streams(cuda_launch.configs(input, -1, None)):
        with tuning.forced(f"fuselab::{form}", "cuda", config):
            output = cuda_launch.forward(input, -1, None, form)
            written = input.clone()
            cuda_launch.forward_in_place(written, -1, form)
        assert torch.equal(written, output)


@pytest.mark.gpu
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


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["kSoftmax", "kLogSoftmax"])
def test_clusters_that_run_at_a_time(form):
    """The grid's bound: at least one, and no more than the multiprocessors have room for. Nothing
    spills."""
    device = torch.device("cuda", torch.cuda.current_device())
    if not cuda_launch._has_clusters(device):
        pytest.skip("needs compute capability 9.0")
    multiprocessors = gpu_limits.multiprocessors(device)
    for step in ("forward", "backward"):
        for vector, name in ((8, "__nv_bfloat16"), (4, "float")):
            for config in streams(cuda_launch._configs(step, 16 // vector, 262_144, device)):
                count = cuda_launch._active_clusters(step, (form, name), vector, config, device)
                assert 1 <= count <= multiprocessors * config.blocks // config.cluster
                expression = cuda_launch._streamed(step, (form, name), vector, config)
                function = cuda_launch.CUDA._ready(expression, device.index, 0)
                registers, local_bytes, _ = cuda_driver.function_resources(function, device.index)
                assert registers <= 64 and local_bytes == 0
