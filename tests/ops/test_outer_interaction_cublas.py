"""outer_interaction_linear by the library's products: in the interpreter, then on a GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from interaction_cases import (
    check,
    check_alone,
    check_output,
    layer,
    layouts,
    moved,
    normal,
    special_vectors,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from fuselab.errors import UnsupportedError
from fuselab.ops import outer_interaction_linear
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops.outer_interaction_linear import cublas_launch
from fuselab.ops.outer_interaction_linear.op import OP
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict

run = partial(check, OP, cublas_launch.forward, cublas_launch.backward)


def in_chunks(step: str, squares: int, *args: Any) -> Any:
    """In the interpreter's process: chunks of so many squares of pairs; what a workspace holds
    before it is written is NaN."""
    before = cublas_launch.CHUNK_BYTES, cublas_launch._LEAST_SQUARES
    cublas_launch.CHUNK_BYTES, cublas_launch._LEAST_SQUARES = 0, squares
    torch.use_deterministic_algorithms(True)
    try:
        return getattr(cublas_launch, step)(*args)
    finally:
        torch.use_deterministic_algorithms(False)
        cublas_launch.CHUNK_BYTES, cublas_launch._LEAST_SQUARES = before


def interpreted(squares: int) -> Any:
    steps = (
        partial(interpreter.run, f"{__name__}:in_chunks", step, squares)
        for step in ("forward", "backward")
    )
    return partial(check, OP, *steps)


@pytest.mark.parametrize(
    "shape", [(1, 0, 1, 1), (3, 1, 2, 3), (8, 0, 16, 2), (65, 0, 17, 5), (2, 4, 7, 3)], ids=str
)
def test_shapes_in_the_interpreter(shape):
    """One block of elements, two and three, the last of them whole and not; of three blocks' 6
    squares all at once, and 4 and 2 of them; samples that fill a row of the transposed, and not."""
    for squares in (8, 4):
        interpreted(squares)(*layer(*shape), "identity")


def transposed_memory(z: torch.Tensor) -> torch.Tensor:
    """All that ``transposed`` allocates, NaN before it is written."""
    torch.use_deterministic_algorithms(True)
    try:
        found = cublas_launch.transposed(z)
    finally:
        torch.use_deterministic_algorithms(False)
    return found.as_strided((found.shape[0], found.stride(0)), found.stride())


def test_the_transposed_is_written_whole():
    """form_across reads the samples past the last."""
    for rows, pitch in ((5, 8), (65, 72), (8, 8)):
        z = normal(rows, 17)
        expected = torch.nn.functional.pad(z.t(), (0, pitch - rows))
        found = interpreter.run(f"{__name__}:transposed_memory", z)
        assert torch.equal(found, expected)


def test_special_values_and_strides_in_the_interpreter():
    dense, embeddings = special_vectors(torch.float32, 2, 2)
    _, _, weight, bias = layer(1, 2, 2, 5)
    interpreted(8)(dense, embeddings, weight, bias, "identity")
    dense, embeddings, weight, bias = layer(4, 2, 3, 4)
    weight = normal(4, 90)[:, 2:83]
    upstream = torch.ones(()).expand(4, 4)
    interpreted(8)(dense, embeddings, weight, bias, "gelu", upstream=upstream)
    steps = interpreted(8).args[1:]
    check_alone(OP, *steps, dense, embeddings, weight, bias, "relu")


def test_no_samples_and_no_outputs():
    dense, embeddings, weight, bias = layer(3, 2, 3, 4)
    for inputs in (
        (dense[:0], embeddings[:0], weight, bias),
        (dense, embeddings, weight[:0], bias[:0]),
    ):
        interpreted(8)(*inputs, "relu")


def test_chunks_are_all_squares_once_and_bounded():
    for rows, width, columns in ((1, 1, 1), (2048, 432, 512), (128, 432, 512), (65536, 432, 512)):
        first = 0
        for piece in cublas_launch.chunks(rows, width, columns):
            assert piece.first == piece.first_tile == first and piece.squares > 0
            assert piece.squares <= 8 or piece.pairs * (rows + columns) * 4 <= 33 * 2560 * 1024
            first += piece.squares
        blocks = -(-width // 16)
        assert first == blocks * (blocks + 1) // 2
    assert [piece.squares for piece in cublas_launch.chunks(2048, 432, 512)] == [33] * 11 + [15]


def test_it_pays_where_products_outweigh_the_folded_weight():
    pays = cublas_launch.pays
    assert pays(2048, 432, 512) and not pays(128, 432, 512)
    assert pays(276, 432, 512) and not pays(275, 432, 512)
    assert not pays(2**20, 16, 512) and not pays(2**20, 17, 512)  # 256 pairs of 256, 768 of 289
    assert pays(2**14, 64, 512) and not pays(2**12, 64, 512)  # 64 MiB: launches
    assert pays(180, 432, 8) and not pays(179, 432, 8)


def test_auto_asks_for_it_in_float32_alone():
    """On fakes that say they are on a GPU."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        for rows, dtype, order in (
            (128, torch.float32, ("reference",)),
            (2048, torch.float32, ("cublas", "reference")),
            (2048, torch.bfloat16, ("wgmma", "triton", "reference")),
        ):
            sizes = (rows, 16), (rows, 26, 16), (512, 432**2)
            dense, embeddings, weight = (torch.empty(s, dtype=dtype, device="cuda") for s in sizes)
            args = dense, embeddings, weight, None, "relu"
            assert OP.prefer(*args) == order
            needs, upstream = (True,) * 4, dense.new_empty(rows, 512)
            assert OP.gradient.prefer(needs, upstream, *OP.gradient.save(upstream, *args)) == order
        flat = torch.empty(16, device="cuda")  # which `validate` refuses afterwards
        assert OP.prefer(flat, embeddings, weight, None, "relu") == ("reference",)


# On a GPU.


@pytest.fixture
def no_fallback():
    with strict():
        yield


gpu = [pytest.mark.gpu, pytest.mark.usefixtures("no_fallback")]


def on_gpu(function):
    for mark in gpu:
        function = mark(function)
    return function


def cuda(*values):
    return tuple(value.cuda() if isinstance(value, torch.Tensor) else value for value in values)


@pytest.fixture(params=["highest", "high"])
def precision(request):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(request.param)
    yield request.param
    torch.set_float32_matmul_precision(before)


@on_gpu
@pytest.mark.parametrize(
    "shape",
    [
        *((1, 0, 1, 1), (3, 1, 2, 3), (3, 0, 17, 2), (127, 1, 16, 129), (257, 4, 13, 257)),
        *((300, 4, 16, 290), (64, 26, 16, 32)),
    ],
    ids=str,
)
def test_shapes(shape):
    run(*cuda(*layer(*shape)), "identity")


@on_gpu
@pytest.mark.filterwarnings("ignore:Deterministic behavior")  # of cuBLAS without its setting
@pytest.mark.parametrize("rows", [1, 127])
@pytest.mark.parametrize("width", [1, 3, 17])
@pytest.mark.parametrize("tables", [0, 2])
def test_odd_sizes_beside_memory_of_nan(rows, width, tables):
    """7 places, or 1, are left past the last sample of the transposed."""
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills what is not written
    try:
        run(*cuda(*layer(rows, tables, width, 4)), "identity")
    finally:
        torch.use_deterministic_algorithms(False)


@on_gpu
@pytest.mark.parametrize("shape", [(3, 0, 16, 8), (129, 2, 16, 252), (64, 26, 16, 32)], ids=str)
def test_precision(shape, precision):
    """Eager's products must be of TF32 where ours are: cuBLAS takes those of 255 outputs in
    float32, and those of the gradient of 127 samples of 32 x 32 products (H200: 4 ulp off, ours
    7400, TF32's 2^-11). Odd sizes are tested in float32 above."""
    run(*cuda(*layer(*shape)), "identity")


@on_gpu
def test_tf32_is_taken_where_it_is_allowed(precision):
    """Errors of 2^-11 and of 2^-24 a product are far apart."""
    inputs = cuda(*layer(256, 3, 16, 128))
    ours = cublas_launch.forward(*inputs, "identity").double()
    exact = OP.reference(*(value.double() for value in inputs))
    error = (ours - exact).norm() / exact.norm()
    assert (1e-5 < error < 1e-3) if precision == "high" else error < 2e-6, f"{error:.1e}"


@on_gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations(activation):
    run(*cuda(*layer(40, 2, 5, 9)), activation)


@on_gpu
def test_in_chunks(monkeypatch):
    """15 squares of pairs, 4 at a time: later chunks add to the first one's sums."""
    monkeypatch.setattr(cublas_launch, "CHUNK_BYTES", 0)
    monkeypatch.setattr(cublas_launch, "_LEAST_SQUARES", 4)
    inputs = cuda(*layer(70, 4, 16, 40))
    run(*inputs, "identity")
    run(*inputs, "gelu")
    check_alone(OP, cublas_launch.forward, cublas_launch.backward, *inputs, "relu")


@on_gpu
def test_special_values():
    for tables in (0, 1, 3):
        dense, embeddings = special_vectors(torch.float32, max(tables, 2), 2)
        _, _, weight, bias = layer(1, tables, 2, 5)
        run(*cuda(dense, embeddings[:, :tables], weight, bias), "identity")
        dense, embeddings, weight, bias = layer(6, tables, 2, 5)
        for place in (0, 1):
            dense[place, place] = torch.finfo(torch.float32).max
        inputs = cuda(dense, embeddings, weight * 4, bias)
        check_output(OP, cublas_launch.forward, *inputs, "identity")


@on_gpu
def test_layouts():
    _, _, weight, bias = layer(1, 2, 4, 4)
    for inputs in layouts(9, 2, 4).values():
        run(*(moved(tensor) for tensor in inputs), *cuda(weight, bias), "identity")
    dense, embeddings, _, _ = cuda(*layer(9, 2, 4, 4))
    weight = normal(4, 150)[:, 2:146].cuda()
    upstream = torch.ones((), device="cuda").expand(9, 4)
    run(dense, embeddings, weight, bias.cuda(), "identity", upstream=upstream)


@on_gpu
def test_the_published_size(precision):
    """Outputs and gradients beside the reference's, to the bit the same twice, and above inputs,
    parameters and gradients at most a tenth of what the plain layer's forward takes."""
    leaves = [tensor.requires_grad_() for tensor in cuda(*layer(2048, 26, 16, 512))]
    upstream = normal(2048, 512, seed=7).cuda()
    ours = partial(outer_interaction_linear, implementation="cublas")

    def step(function):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        output = function(*leaves, "identity")  # no kink, which rounding decides
        results = output.detach(), *torch.autograd.grad(output, leaves, upstream)
        needed = sum(tensor.numel() * tensor.element_size() for tensor in results)
        return results, torch.cuda.max_memory_allocated() - before - needed

    first, _ = step(ours)  # builds
    second, taken = step(ours)
    assert all(map(torch.equal, first, second))
    del second
    assert taken < 150 * 2**20, f"{taken / 2**20:.0f} MiB; the outer product alone is 1458"
    expected, _ = step(partial(outer_interaction_linear, implementation="reference"))
    for mine, true in zip(first, expected, strict=True):
        error = ((mine - true).norm() / true.norm()).item()
        assert error < (2e-3 if precision == "high" else 1e-5), f"{tuple(mine.shape)} {error:.1e}"


@on_gpu
@pytest.mark.filterwarnings("ignore:Deterministic behavior")  # of cuBLAS without its setting
def test_runs_in_a_graph_and_in_deterministic_mode(precision):
    leaves = [tensor.requires_grad_() for tensor in cuda(*layer(64, 5, 16, 40))]

    def step():
        output = outer_interaction_linear(*leaves, "relu", implementation="cublas")
        return output, *torch.autograd.grad(output, leaves, torch.ones_like(output))

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        leaves[0].copy_(normal(64, 16, seed=6))
    graph.replay()
    for ours, theirs in zip(captured, step(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        first = step()
        assert all(map(torch.equal, first, step()))
    finally:
        torch.use_deterministic_algorithms(False)


@on_gpu
def test_refuses_what_it_cannot_run():
    with pytest.raises(UnsupportedError, match="float32"):
        outer_interaction_linear(*cuda(*layer(4, 2, 5, 8, torch.bfloat16)), implementation="cublas")
