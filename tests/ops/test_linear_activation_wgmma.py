"""linear_activation on Hopper's warpgroup matrix instructions, and through cuBLASLt's epilogue."""

from __future__ import annotations

import ctypes
import itertools
from types import SimpleNamespace

import pytest
import torch
from linear_cases import LAYOUTS, check, operands
from pointwise_cases import assert_within_bar

from fuselab.errors import BuildError, LaunchError, UnsupportedError
from fuselab.ops import linear_activation
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.linear_activation import cublaslt_launch, wgmma_launch
from fuselab.ops.linear_activation.op import OP
from fuselab.ops.linear_activation.reference import reference
from fuselab.runtime import cuda_driver, launch_plans, tuning
from fuselab.runtime.fallback import strict
from fuselab.runtime.parameters import encode
from fuselab.runtime.tensor_map import tensor_map, why_not
from fuselab.runtime.tuning import Config

HALF = (torch.bfloat16, torch.float16)
halves = pytest.mark.parametrize("dtype", HALF, ids=lambda dtype: str(dtype)[6:])
CONFIGS = (*wgmma_launch._CONFIGS, wgmma_launch._PAIR)
configs = pytest.mark.parametrize("config", CONFIGS, ids=str)
KERNELS = {
    "wgmma": (wgmma_launch.forward, wgmma_launch.backward),
    "cublaslt": (cublaslt_launch.forward, cublaslt_launch.backward),
}
implementations = pytest.mark.parametrize("implementation", KERNELS)


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is for compute capability 9.0")


def without_overlap(matrix):
    return matrix.clone() if 0 in matrix.stride() else matrix


def assert_forward(input, weight, bias, activation="relu", config=None, what=""):
    """The kernel's output against float64, in eager's measure."""
    ours = wgmma_launch.forward(input, weight, bias, activation, config)
    assert ours.dtype == input.dtype and ours.is_contiguous()
    exact = (None if value is None else value.double() for value in (input, weight, bias))
    eager = reference(input, weight, bias, activation)
    assert_within_bar(ours, eager, reference(*exact, activation), what or str(config))


# Without a GPU.


def test_every_candidate_fits_a_block_of_hopper():
    for config in CONFIGS:
        assert wgmma_launch.shared_bytes(config) <= 227 * 1024, config


@pytest.mark.parametrize(
    ("rows", "columns", "expected"),
    [
        *((65536, 64, 64), (65536, 65, 128), (65536, 256, 256), (4096, 4096, 256)),
        *((4096, 1000, 256), (2048, 1024, 128), (2048, 1030, 64), (512, 700, 64)),
    ],
)
def test_the_default_gives_the_busiest_multiprocessor_the_fewest_columns(rows, columns, expected):
    found = wgmma_launch.candidates(rows, columns, 132)
    assert (found[0].columns, found[0].cluster) == (expected, 1)
    assert len(set(found)) == len(found) == {64: 1, 65: 2}.get(columns, 4)


@pytest.mark.parametrize(
    ("rows", "columns", "depth", "cluster"),
    [(65536, 256, 512, 1), (16384, 1024, 1024, 1), (4096, 4096, 4096, 2)],
)
def test_what_ships_for_the_h200_is_a_candidate(rows, columns, depth, cluster):
    """A choice that is none would be passed over without a word."""
    shipped = tuning.read(tuning.shipped_file(OP, "NVIDIA H200"))["operators"][OP.name]["wgmma"]
    config = Config(**shipped[f"bfloat16 {rows} {columns} {depth}"]["config"])
    assert config in wgmma_launch.candidates(rows, columns, 132)
    assert (config.columns, config.cluster) == (256, cluster)


@pytest.mark.parametrize("dtype", (*HALF, torch.float32, torch.float64))
def test_cublaslts_epilogue_serves_16_bits_alone(dtype, monkeypatch):
    called = []
    library, ours = torch._addmm_activation, cublaslt_launch.activate
    monkeypatch.setattr(
        torch, "_addmm_activation", lambda *args, **how: called.append(library) or library(*args)
    )
    monkeypatch.setattr(cublaslt_launch, "activate", lambda *args, **how: called.append(ours))
    for activation in ("relu", "gelu_tanh"):
        cublaslt_launch.forward(*operands(3, 8, 8, dtype), activation)
    assert called == [library if dtype in HALF else ours] * 2


def test_cublaslts_epilogue_serves_whole_words_alone():
    """For others cuBLASLt rounds the product before it adds the bias."""
    room = torch.zeros(4096, dtype=torch.float16)

    def matrix(rows, columns, pitch=None, offset=0):
        return room.as_strided((rows, columns), (pitch or columns, 1), offset)

    for fuses, input, weight, bias in (
        (True, matrix(3, 8), matrix(8, 8), room[:8]),
        (True, matrix(3, 8, 16), matrix(16, 8, 8, 8), room[8:24]),
        (True, matrix(8, 8).t(), matrix(8, 8).t(), room[:8]),
        (False, matrix(3, 2), matrix(2, 2), room[:2]),
        (False, matrix(3, 8), matrix(12, 8), room[:12]),
        (False, matrix(3, 12), matrix(8, 12), room[:8]),
        (False, matrix(3, 8, 12), matrix(8, 8), room[:8]),
        (False, matrix(8, 3).t(), matrix(8, 8), room[:8]),
        (False, matrix(3, 8, offset=1), matrix(8, 8), room[:8]),
        (False, matrix(3, 8), matrix(8, 8, offset=4), room[:8]),
        (False, matrix(3, 8), matrix(8, 8), room[1:9]),
    ):
        strides = (input.stride(), weight.stride())
        assert cublaslt_launch._fuses(input, weight, bias) is fuses, strides


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("activation", ["relu", "gelu_tanh"])
def test_cublaslt_rounds_after_the_bias(dtype, activation):
    """Where product and bias cancel, what was rounded between them shows."""
    for rows, columns, depth in itertools.product((31, 85, 128), (1, 2, 7, 8, 24), (1, 2, 8, 40)):
        input, weight, _ = operands(rows, depth, columns, dtype, "cuda")
        product = (input.double() @ weight.double().t())[rows // 2]
        bias = (-product + 0.01 * product.abs()).to(dtype)
        check(cublaslt_launch.forward, cublaslt_launch.backward, input, weight, bias, activation)


@pytest.mark.parametrize("layout", ["one_row", "one_column", "transposed"])
def test_cublaslt_hands_the_library_nothing_that_overlaps(layout, monkeypatch):
    """Of an expanded Wᵀ cuBLAS sums in another order, 7.6 ulp off in float32 on an H200."""
    input, weight, bias = operands(8, 8, 8)
    args = (LAYOUTS[layout](input), LAYOUTS[layout](weight), bias, "identity")
    of_copies = reference(*map(without_overlap, args[:2]), *args[2:])
    given, linear = [], cublaslt_launch.linear
    monkeypatch.setattr(
        cublaslt_launch, "linear", lambda *args: given.extend(args[:2]) or linear(*args)
    )
    assert torch.equal(cublaslt_launch.forward(*args), of_copies)
    strides = (1, 8) if layout == "transposed" else (8, 1)
    assert [matrix.stride() for matrix in given] == [strides] * 2


def test_a_source_for_one_chip_is_compiled_for_it_alone():
    assert wgmma_launch.WGMMA.arch_for("sm_90") == "sm_90a"
    assert wgmma_launch.WGMMA.arch_for("sm_100") == "sm_100"
    expression = wgmma_launch.CUDA_EXPRESSIONS[0]
    assert len(wgmma_launch.WGMMA.compile(expression, "sm_90a")) > 10_000
    with pytest.raises(BuildError, match="sm_80"):
        wgmma_launch.WGMMA.compile(expression, "sm_80")


def test_what_the_copy_engine_cannot_read():
    matrix = torch.zeros(64, 64, dtype=torch.bfloat16)
    fine = (matrix, matrix[1:, 8:], matrix[::2], matrix[:1, :13], matrix[:, :13], matrix[:, :1])
    assert [why_not(view) for view in fine] == [None] * len(fine)
    for view, reason in (
        (matrix.float(), "float16"),
        (matrix[:, 1:], "multiple of 16 bytes"),
        (matrix.t(), "not contiguous"),
        (matrix[:, ::2], "not contiguous"),
        (torch.zeros(4, 13, dtype=torch.float16), "16 bytes apart"),
        (matrix[:1].expand(8, 64), "overlap"),
        (matrix.flatten().as_strided((8, 64), (8, 1)), "overlap"),
    ):
        assert reason in (why_not(view) or "")


def test_a_tensor_map_is_asked_for_by_columns_and_rows(monkeypatch):
    calls = []

    def encode_tiled(*args):
        calls.append(args)
        assert args[0].value % 64 == 0
        ctypes.memmove(args[0].value, bytes(range(128)), 128)
        return 0

    def made(matrix, *box):
        return cuda_driver.packed(*encode([tensor_map(matrix, *box)]))[0][0].raw

    driver = SimpleNamespace(cuTensorMapEncodeTiled=encode_tiled)
    monkeypatch.setattr(cuda_driver, "library", lambda: driver)
    matrix = torch.zeros(100, 72, dtype=torch.bfloat16)[:, :60]
    assert made(matrix, 128, 64) == bytes(range(128))
    _, dtype, rank, address, sizes, strides, box, steps, *modes = calls[0]
    assert (dtype, rank, address.value) == (9, 2, matrix.data_ptr())
    assert [*map(list, (sizes, strides, box, steps))] == [[60, 100], [144], [64, 128], [1, 1]]
    assert modes == [0, 3, 3, 0]
    # A single row may have any stride.
    made(torch.zeros(1, 13, dtype=torch.float16), 128, 64)
    assert list(calls[1][5]) == [32]
    driver.cuTensorMapEncodeTiled = lambda *args: 1
    monkeypatch.setattr(cuda_driver, "error_name", lambda status: "CUDA_ERROR_INVALID_VALUE")
    with pytest.raises(LaunchError, match=r"\(100, 60\).*INVALID_VALUE"):
        made(matrix, 64, 64)
    del driver.cuTensorMapEncodeTiled
    with pytest.raises(BuildError, match=r"12\.0"):
        made(matrix, 64, 64)


# On a GPU, what is simplest first: a fault there is the reason of all that follow.


@pytest.mark.gpu
@configs
def test_one_tile(hopper, config):
    """One step in depth, one tile: the operands' places and the accumulators' fragments."""
    device = torch.device("cuda")
    eye = torch.eye(64, device=device, dtype=torch.bfloat16)
    numbered = torch.arange(128 * 64, device=device).view(128, 64).remainder(251).bfloat16()
    ours = wgmma_launch.forward(numbered, eye, None, "identity", config)
    torch.testing.assert_close(ours, numbered, rtol=0, atol=0)
    ours = wgmma_launch.forward(eye, numbered, None, "identity", config)
    torch.testing.assert_close(ours, numbered.t().contiguous(), rtol=0, atol=0)


@pytest.mark.gpu
@configs
def test_rings_and_tiles(hopper, config):
    """More steps than slots, more tiles than blocks, and every edge."""
    for rows, depth, columns in (
        (128, 64 * 20, 256),
        (128 * 150, 64, 256),
        (128 * 301, 64 * 3, 512),
        (1, 8, 8),
        (65, 72, 136),
        (129, 1000, 264),
        (300, 24, 1000),
        (20_000, 200, 328),
        # Columns that are no multiple of 8, so written one by one.
        (1, 72, 13),
        (700, 136, 257),
    ):
        what = f"{config} {rows}x{depth}->{columns}"
        assert_forward(
            *operands(rows, depth, columns, torch.bfloat16, "cuda"), config=config, what=what
        )


@pytest.mark.gpu
@configs
def test_every_tile_gives_the_same_bits(hopper, config):
    """The sums are of one order, 16 bytes to a store or 2; each tile of columns has its bias."""
    for dtype, columns in ((torch.bfloat16, 520), (torch.bfloat16, 523), (torch.float16, 520)):
        args = (*operands(20_001, 264, columns, dtype, "cuda"), "relu")
        ours = wgmma_launch.forward(*args, config)
        default = wgmma_launch.forward(*args, wgmma_launch._CONFIGS[0])
        assert torch.equal(ours, default), f"{dtype} {columns}"


@pytest.mark.gpu
@halves
@pytest.mark.parametrize("depth", [8, 16, 24, 64, 72, 1000])
def test_shapes(hopper, dtype, depth):
    sizes = (1, 63, 64, 65, 127, 128, 129, 255, 256, 257)
    for rows in sizes:
        for columns in (*sizes, 8, 72):
            args = operands(rows, depth, columns, dtype, "cuda", bias=rows % 2 == 1)
            assert_forward(*args, what=f"{rows}x{depth}->{columns}")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 129])
def test_other_depths_of_padded_rows(hopper, rows):
    for depth in (1, 7, 13, 63, 65, 127):
        input, weight, bias = operands(rows, depth + 8 - depth % 8, 72, torch.bfloat16, "cuda")
        # What lies behind the rows must not be multiplied.
        input[:, depth:], weight[:, depth:] = float("nan"), float("nan")
        assert_forward(input[:, :depth], weight[:, :depth], bias)


@pytest.mark.gpu
@implementations
@pytest.mark.parametrize("dtype", (*HALF, torch.float32), ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_and_gradients(hopper, implementation, dtype, activation):
    if implementation != "cublaslt" and dtype == torch.float32:
        pytest.skip("wgmma takes float16 and bfloat16")
    for shape, bias in (((1031, 200, 136), True), ((130, 64, 257), False), ((1, 16, 8), True)):
        args = operands(*shape, dtype, "cuda", bias=bias)
        check(*KERNELS[implementation], *args, activation)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtype", (*HALF, torch.float32, torch.float64), ids=lambda dtype: str(dtype)[6:]
)
def test_cublaslt_in_every_dtype_and_layout(dtype):
    """Beyond 16 bits, and without a bias, the product is eager's own, to the bit, TF32 or not; of
    an operand that overlaps itself, that of its copy."""
    before = torch.get_float32_matmul_precision()
    for lay_out in LAYOUTS.values():
        for has_bias in (True, False):
            input, weight, bias = operands(48, 48, 48, dtype, "cuda", bias=has_bias)
            args = (lay_out(input), lay_out(weight), bias)
            for activation in ("relu", "gelu_tanh", "silu"):
                check(*KERNELS["cublaslt"], *args, activation)
            if dtype in HALF and has_bias:
                continue
            try:
                for precision in ("highest", "high"):
                    torch.set_float32_matmul_precision(precision)
                    ours = cublaslt_launch.forward(*args, "relu")
                    of_copies = reference(*map(without_overlap, args[:2]), bias, "relu")
                    assert torch.equal(ours, of_copies)
            finally:
                torch.set_float32_matmul_precision(before)


@pytest.mark.gpu
@implementations
def test_nan_and_infinity_go_where_they_go_in_eager(hopper, implementation):
    forward, _ = KERNELS[implementation]
    for activation in ("identity", "relu", "leaky_relu", "sigmoid"):
        for dtype in HALF:
            input, weight, bias = operands(200, 136, 264, dtype, "cuda")
            input[3, 5], input[131, 7], input[199, 135] = float("nan"), float("inf"), -float("inf")
            bias[9], bias[263] = float("inf"), float("nan")
            ours = forward(input, weight, bias, activation)
            eager = reference(input, weight, bias, activation)
            exact = reference(input.double(), weight.double(), bias.double(), activation)
            assert_within_bar(ours, eager, exact, f"{activation} {dtype}")


@pytest.mark.gpu
def test_overflow_is_infinite_in_float16(hopper):
    input = torch.full((130, 64), 60.0, device="cuda", dtype=torch.float16)
    ours = wgmma_launch.forward(input, input[:8], None, "relu")
    assert torch.equal(ours, torch.full_like(ours, float("inf")))


@pytest.mark.gpu
@halves
def test_views(hopper, dtype):
    input, weight, bias = operands(300, 144, 144, dtype, "cuda")
    for view in (
        lambda tensor: tensor[:, :136],
        lambda tensor: tensor[:, 8:],
        lambda tensor: tensor[3::2, 16:29],
    ):
        assert_forward(
            view(input), view(weight), bias.repeat_interleave(2)[::2][: len(view(weight))]
        )
    batch = input.view(3, 4, 25, 144)
    ours = linear_activation(batch, weight, bias, implementation="wgmma")
    torch.testing.assert_close(ours, reference(batch, weight, bias), rtol=0.02, atol=0.02)
    ours = linear_activation(input[5], weight, bias, implementation="wgmma")
    torch.testing.assert_close(ours, reference(input[5], weight, bias), rtol=0.02, atol=0.02)
    for name, args in (
        ("input", (input[:, 1:], weight[:, :-1])),
        ("input", (input[:144].t(), weight)),
        ("input", (input[:1].expand(9, 144), weight)),
        ("weight", (input, weight.t())),
        ("weight", (input, weight[:, :1].expand(144, 144))),
    ):
        with pytest.raises(UnsupportedError, match=f"copy engine cannot read '{name}'"):
            linear_activation(*args, None, implementation="wgmma")


@pytest.mark.gpu
@configs
def test_repeats_to_the_bit(hopper, config):
    """A race of loads, multiplications or stores would show in one of many launches."""
    args = (*operands(128 * 200 + 5, 520, 520, torch.bfloat16, "cuda"), "gelu", config)
    assert_forward(*args)
    first = wgmma_launch.forward(*args)
    for _ in range(100):
        assert torch.equal(wgmma_launch.forward(*args), first)


@pytest.mark.gpu
@implementations
def test_every_call_reads_its_own_tensors(hopper, implementation):
    for seed in range(4):
        input, weight, bias = operands(640 + seed // 2, 128, 128, torch.bfloat16, "cuda")
        input, weight = input.roll(seed), weight.roll(seed)  # new memory, the same shape
        ours = linear_activation(input, weight, bias, implementation=implementation)
        torch.testing.assert_close(ours, reference(input, weight, bias), rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_a_plan_makes_its_maps_for_the_tensors_of_the_call(hopper):
    """Both stores, with and without a bias; other addresses, another stream, a graph."""
    (op_id,) = (
        place for place, name in enumerate(launch_plans._names) if name == wgmma_launch.NAME
    )
    for columns in (128, 130):
        for bias in (True, False):
            keep = operands(640, 136, columns, torch.bfloat16, "cuda", bias=bias)
            linear_activation(*keep, implementation="wgmma")
            others = []
            for seed in range(4):
                args = operands(640, 136, columns, torch.bfloat16, "cuda", bias=bias)
                args = (args[0].roll(seed), args[1].roll(seed), args[2], "relu")
                others.append(args)
                assert launch_plans.planned(op_id, "wgmma", args)
                ours = linear_activation(*args, implementation="wgmma")
                assert torch.equal(ours, wgmma_launch.forward(*args))
            torch.cuda.synchronize()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.cuda._sleep(10_000_000)
                changed = (others[0][0] * 2, *others[0][1:])
                ours = linear_activation(*changed, implementation="wgmma")
            stream.synchronize()
            assert torch.equal(ours, wgmma_launch.forward(*changed))
            graph, static = torch.cuda.CUDAGraph(), (others[1][0].clone(), *others[1][1:])
            with torch.cuda.graph(graph):
                captured = linear_activation(*static, implementation="wgmma")
            for args in others:
                static[0].copy_(args[0])
                graph.replay()
                assert torch.equal(captured, wgmma_launch.forward(*static))
    # From 2 bytes on, the copy engine reads nothing, with a plan for the like of it or without.
    storage = torch.zeros(640 * 136 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(640, 136)
    with pytest.raises(UnsupportedError, match="copy engine cannot read 'input'"):
        linear_activation(storage, *keep[1:], implementation="wgmma")


@pytest.mark.gpu
@implementations
def test_runs_on_the_callers_stream_and_in_a_graph(hopper, implementation):
    args = operands(640, 128, 128, torch.bfloat16, "cuda")
    leaves = [value.requires_grad_() for value in args]

    def step():
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
        leaves[0].copy_(operands(641, 128, 128, torch.bfloat16, "cuda")[0][1:])
    graph.replay()
    for ours, theirs in zip(results, step(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(hopper):
    columns = 512
    rows = 2**31 // columns + 67
    if torch.cuda.mem_get_info()[0] < 8 * rows * columns:
        pytest.skip(f"needs {8 * rows * columns / 2**30:.0f} GiB of free GPU memory")
    _, weight, bias = operands(1, 16, columns, torch.bfloat16, "cuda")
    input = torch.zeros(rows, 16, device="cuda", dtype=torch.bfloat16)
    input[-70:] = 1
    for width in (columns, columns - 1):  # 16 bytes to a store, and 2
        ours = wgmma_launch.forward(input, weight[:width], bias[:width], "relu")
        for part in (slice(-70, None), slice(0, 3)):
            theirs = reference(input[part], weight[:width], bias[:width])
            torch.testing.assert_close(ours[part], theirs, rtol=0.02, atol=0.02)
        del ours
