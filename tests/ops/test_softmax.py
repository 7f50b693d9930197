"""softmax: the public function, its refusals, and the C++ kernels."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from softmax_cases import (
    BOUNDARY_WIDTHS,
    assert_backward,
    assert_forward,
    layouts,
    normal,
    special_rows,
)

from fuselab.errors import ArgumentError, DtypeError
from fuselab.ops import softmax
from fuselab.ops.softmax import cpu_launch, cuda_launch
from fuselab.ops.softmax.cases import CASES
from fuselab.ops.softmax.layout import Rows, rows_of, vector_length
from fuselab.ops.softmax.op import OP
from fuselab.ops.softmax.op import regime as regime_of
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
implementations = pytest.mark.parametrize("implementation", ["cpp", "reference"])


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


# The C++ kernels


@dtypes
def test_cpp_widths(dtype):
    for width in (*BOUNDARY_WIDTHS, 4097):
        input = normal(3, width, dtype=dtype, seed=width)
        assert_forward(cpu_launch.forward, input)
        assert_backward(
            cpu_launch.backward, torch.softmax(input, -1), normal(3, width, dtype=dtype, seed=1)
        )


@dtypes
@pytest.mark.parametrize("shape, dim", [((2, 5, 7), 1), ((33, 70), 0), ((3, 40, 129), 1)])
def test_cpp_columns(dtype, shape, dim):
    input = normal(*shape, dtype=dtype)
    assert_forward(cpu_launch.forward, input, dim)
    grad = normal(*shape, dtype=dtype, seed=1)
    assert_backward(cpu_launch.backward, torch.softmax(input, dim), grad, dim)


@dtypes
@pytest.mark.parametrize("dim", [0, 1])
def test_cpp_special_values(dtype, dim):
    input = special_rows(dtype)
    assert_forward(cpu_launch.forward, input if dim else input.t().contiguous(), dim)


def test_cpp_more_rows_than_one_thread_takes():
    input = normal(700, 65)
    assert_forward(cpu_launch.forward, input)
    assert_forward(cpu_launch.forward, normal(20, 65, 70), 1)


# The public function


@implementations
@pytest.mark.parametrize("layout", layouts())
def test_layouts(implementation, layout):
    input, dim = layouts()[layout]
    assert_forward(partial(softmax, implementation=implementation), input, dim)


@implementations
def test_upstream_gradients_of_any_stride(implementation):
    input = normal(6, 11).requires_grad_()
    for grad in (
        normal(6, 11, seed=1),
        torch.ones(()).expand(6, 11),
        normal(6, 1, seed=2).expand(6, 11),
        normal(11, 6, seed=3).t(),
        normal(6, 33, seed=4)[:, 1::3],
    ):
        for dim in (0, 1):
            ours, eager = (
                torch.autograd.grad(function(input, dim), input, grad)[0]
                for function in (partial(softmax, implementation=implementation), torch.softmax)
            )
            torch.testing.assert_close(ours, eager)


def test_two_backward_calls_give_the_same():
    input = normal(5, 9).requires_grad_()
    output = softmax(input)
    grad = normal(5, 9, seed=1)
    first, second = (
        torch.autograd.grad(output, input, grad, retain_graph=True)[0] for _ in range(2)
    )
    assert torch.equal(first, second) and first.abs().max() > 0


@implementations
def test_rows_sum_to_one(implementation):
    for mean in (0.0, -200.0, 3000.0):
        sums = softmax(normal(50, 333) + mean, implementation=implementation).double().sum(-1)
        torch.testing.assert_close(sums, torch.ones(50, dtype=torch.float64), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("shape", "dim", "regime"),
    [
        ((), 0, "rows up to 7"),
        ((8, 3), -1, "rows up to 7"),
        ((8, 15), -1, "rows up to 15"),
        ((8, 16), -1, "rows up to 31"),
        ((4, 2047), 1, "rows up to 2047"),
        ((4, 2048), 1, "rows"),
        ((8, 1000, 1), 1, "rows up to 2047"),
        ((8, 1000, 3), 1, "narrow columns"),
        ((8, 1000, 16), 1, "columns"),
    ],
)
def test_regimes_that_are_measured_apart(shape, dim, regime):
    assert regime_of(torch.empty(shape), dim) == regime


def test_a_cast_is_a_regime_of_its_own():
    assert regime_of(torch.empty(8, 3), -1, torch.float64) == "cast"
    assert regime_of(torch.empty(8, 3), -1, torch.float32) == "rows up to 7"


@dtypes
def test_cpp_keeps_subnormal_results(dtype):
    """Flushed, the column of smallest terms would be 0, and its gradient too."""
    limits = torch.finfo(dtype)
    smallest = math.log(limits.smallest_normal) + math.log(0.1)
    input = torch.tensor([[0.0, smallest], [0.0, -math.inf]], dtype=torch.float64).to(dtype)
    for ours in (cpu_launch.forward(input, -1, None), cpu_launch.forward(input.t(), 0, None).t()):
        exact = torch.softmax(input.double(), -1)
        assert 0 < ours[0, 1] < limits.smallest_normal and ours[1].tolist() == [1.0, 0.0]
        step = limits.smallest_normal * limits.eps
        assert abs(ours[0, 1].double() - exact[0, 1]) <= 2 * step


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 4000])
def test_cpp_rows_narrower_than_a_vector(rows):
    for width in (1, 7, 8, 10, 15):
        for dtype in DTYPES:
            assert_forward(cpu_launch.forward, normal(rows, width, dtype=dtype, seed=width))
    assert_forward(cpu_launch.forward, normal(rows, 3, 9)[:, :, 1:6])
    assert_forward(cpu_launch.forward, special_rows(torch.float32, 6))


@implementations
def test_a_shift_of_a_row_changes_nothing(implementation):
    input = (normal(4, 100) * 8).round() / 8  # eighths below 2^20 are exact in float32
    expected = softmax(input, implementation=implementation)
    assert torch.equal(softmax(input + 4096.0, implementation=implementation), expected)


@implementations
def test_empty_and_scalar(implementation):
    function = partial(softmax, implementation=implementation)
    assert function(torch.tensor(3.0)).item() == 1.0
    assert function(torch.tensor(3.0), 0).item() == 1.0
    assert math.isnan(function(torch.tensor(math.inf)).item())
    assert math.isnan(function(torch.tensor(math.nan)).item())
    for shape, dim in (((0, 3), 1), ((3, 0), 1), ((3, 0), 0), ((2, 0, 4), 1)):
        output = function(torch.empty(shape, requires_grad=True), dim)
        assert output.shape == shape
        output.sum().backward()


@implementations
def test_dtype_casts_first_and_the_gradient_has_the_inputs(implementation):
    function = partial(softmax, implementation=implementation)
    for source in (*DTYPES, torch.int32, torch.bool, torch.uint8):
        for dtype in DTYPES:
            input = (normal(3, 20, dtype=torch.float64) * 4).to(source)
            assert_forward(function, input, -1, dtype)
            if source.is_floating_point:
                input.requires_grad_()
                output = function(input, -1, dtype)
                grad = normal(3, 20, dtype=dtype, seed=1)
                (ours,) = torch.autograd.grad(output, input, grad)
                (eager,) = torch.autograd.grad(torch.softmax(input, -1, dtype=dtype), input, grad)
                assert ours.dtype == source
                limit = max(torch.finfo(kind).eps for kind in (source, dtype))
                torch.testing.assert_close(ours.double(), eager.double(), rtol=limit, atol=limit)


def test_autocast_leaves_the_cpu_alone():
    input = normal(3, 20, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        assert softmax(input).dtype == torch.softmax(input, -1).dtype == torch.bfloat16


@pytest.mark.parametrize("shape, dim", [((3, 4), 0), ((3, 4), -1), ((2, 3, 4), 1), ((), -1)])
def test_first_and_second_derivatives(shape, dim):
    input = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda value: softmax(value, dim), input)
    assert torch.autograd.gradgradcheck(lambda value: softmax(value, dim), input)


def test_only_the_output_is_saved():
    input = normal(8, 16).requires_grad_()
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        output = softmax(input)
    assert [tensor.data_ptr() for tensor in saved] == [output.data_ptr()]


def test_compiles_without_a_break_and_under_torch_func():
    input = normal(4, 30)
    compiled = torch.compile(lambda value: softmax(value, 0) * 2, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(input), torch.softmax(input, 0) * 2)
    torch.testing.assert_close(torch.func.vmap(softmax)(input), torch.softmax(input, -1))


# Refusals


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range(dim):
    with pytest.raises(ArgumentError, match=rf"'dim' is {dim}.* -2 to 1"):
        softmax(torch.ones(3, 4), dim)
    with pytest.raises(ArgumentError, match="expected -1 to 0"):
        softmax(torch.ones(()), 1)


def test_refused_dtypes():
    for dtype in (torch.int64, torch.bool, torch.complex64):
        with pytest.raises(DtypeError, match="'input' is torch"):
            softmax(torch.ones(3, dtype=dtype))
    with pytest.raises(DtypeError, match=r"'dtype' is torch\.int32"):
        softmax(torch.ones(3), dtype=torch.int32)


# The contract


def test_fake_agrees_with_torch_on_every_layout():
    for input, dim in layouts().values():
        for dtype in (None, torch.float64):
            expected = torch.softmax(input, dim, dtype=dtype)
            fake = OP.fake(input, dim, dtype)
            assert (fake.shape, fake.stride(), fake.dtype) == (
                expected.shape,
                expected.stride(),
                expected.dtype,
            )


def test_cost_counts_every_byte_once():
    cost = OP.cost(torch.empty(8, 16, dtype=torch.float16), -1, torch.float32)
    assert (cost.bytes_read, cost.bytes_written, cost.unit) == (256, 512, "fp32")
    assert OP.cost(torch.empty(8, 1).expand(8, 16), -1, None).bytes_read == 32
    assert OP.cost_backward is not None
    cost = OP.cost_backward(torch.empty(8, 16, dtype=torch.float16), -1, torch.float32)
    assert (cost.bytes_read, cost.bytes_written) == (1024, 256)


def test_cases_are_repeatable_and_run():
    for case in CASES:
        if case.tags & {"huge", "bench"} and "tiny" not in case.tags:
            continue
        make = partial(case.make, torch.device("cpu"), torch.float32)
        first, second = (make(torch.Generator().manual_seed(7)) for _ in range(2))
        assert torch.equal(first.args[0], second.args[0])
        assert_forward(softmax, first.args[0], first.kwargs.get("dim", -1))


@pytest.mark.parametrize("rewrite", OP.rewrites, ids=lambda rewrite: rewrite.pattern.__name__)
def test_rewrites_compute_the_same(rewrite):
    input = normal(3, 5, 7)
    inputs = rewrite.call(input, 1)
    torch.testing.assert_close(softmax(*inputs.args, **inputs.kwargs), rewrite.pattern(input, 1))


# Where rows lie, and which CUDA kernel they take


def test_rows_are_read_in_place_where_two_strides_say_where():
    base = normal(6, 10, 24)
    assert rows_of(base, -1) == Rows(60, 24, 1, 24, 0, 1, columns=False)
    assert rows_of(base, 1) == Rows(144, 10, 24, 240, 1, 24, columns=True)
    assert rows_of(base, 0) == Rows(240, 6, 240, 0, 1, 240, columns=True)
    assert rows_of(base[:, ::3, 4:], -1) == Rows(24, 20, 4, 240, 72, 1, columns=False)
    assert rows_of(normal(4, 1).expand(4, 9), -1) == Rows(4, 9, 1, 1, 0, 0, columns=False)
    assert rows_of(base.transpose(1, 2), -1) is None  # elements 96 bytes apart: copied


def test_vectors_follow_width_strides_and_alignment():
    def length(tensor: torch.Tensor) -> int:
        rows = rows_of(tensor, -1)
        assert rows is not None
        return vector_length(rows, tensor)

    base = torch.empty(16, 64)
    assert length(base) == 4
    assert length(base.bfloat16()) == 8
    assert length(base.double()) == 2
    assert length(base[:, :62]) == 2
    assert length(base[:, :61]) == 1
    assert length(torch.empty(16, 62)[:, :60]) == 2
    assert length(base[:, 1:61]) == 1
    assert length(base[:, ::2]) == 1


def test_tables_hold_what_they_say():
    """Every width finds the first line that holds it; elements are whole vectors."""
    for (_, itemsize), tables in cuda_launch.CUDA_ROWS.items():
        for table in tables:
            widths = [line.threads * line.elements * line.cluster for line in table]
            assert widths == sorted(widths)
            for line in table:
                assert line.elements % (16 // itemsize) == 0
                assert line.threads in (1, 2, 4, 8, 16) or line.threads % 32 == 0
                assert max(line.threads, 128) * line.blocks <= 2048
        assert all(line.cluster == 1 for line in tables[1])


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_candidates_hold_the_width_and_begin_with_the_default(step, itemsize):
    for largest in (1, 8, 16):
        for width in (1, 512, 513, 4096, 100_000, 262_144, 1_000_000):
            candidates = cuda_launch.cuda_candidates(step, itemsize, width, largest)
            assert len(candidates) == len(set(candidates))
            for candidate in candidates:
                if "cluster" in candidate:
                    held = candidate.threads * candidate.elements * candidate.cluster
                    assert held >= width and candidate.cluster <= largest
                    assert max(candidate.threads, 128) * candidate.blocks <= 2048
            table = cuda_launch.CUDA_ROWS[step, itemsize][largest == 1]
            of_few = cuda_launch.cuda_candidates(step, itemsize, width, largest, many=False)[0]
            assert of_few in table or "piece" in of_few
            assert of_few in candidates


@pytest.mark.parametrize("step", ["forward", "backward"])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_many_rows_have_threads_with_few_empty_slots(step, itemsize):
    """Of a row that one block holds, at least 0.6 of the slots are used, also by rows that begin
    between vectors, and no power of two gets another spread than the table's."""
    for width in range(128, 8192, 7):
        first = cuda_launch.cuda_candidates(step, itemsize, width, 16)[0]
        assert width >= 0.6 * first.threads * first.elements, (width, first)
        assert first.elements % (16 // itemsize) == 0
        assert max(first.threads, 128) * first.blocks <= 2048
    for width in (64, 256, 1024, 4096):
        few = cuda_launch.cuda_candidates(step, itemsize, width, 16, many=False)
        assert cuda_launch.cuda_candidates(step, itemsize, width, 16)[0] == few[0]


@pytest.mark.parametrize(
    "step, itemsize, width, largest, expected",
    [
        ("forward", 4, 8_193, 8, "threads=256 elements=16 blocks=8 cluster=4"),
        ("forward", 4, 16_384, 1, "threads=1024 elements=16 blocks=2 cluster=1"),
        ("forward", 2, 16_384, 16, "threads=1024 elements=16 blocks=2 cluster=1"),
        ("forward", 2, 32_768, 16, "threads=512 elements=32 blocks=4 cluster=2"),
        ("forward", 2, 65_536, 16, "threads=512 elements=32 blocks=4 cluster=4"),
        ("forward", 2, 131_072, 16, "threads=512 elements=32 blocks=4 cluster=8"),
        ("forward", 2, 200_000, 16, "threads=512 elements=32 blocks=4 cluster=16"),
        ("forward", 2, 262_144, 8, "threads=1024 elements=32 blocks=2 cluster=8"),
        ("forward", 2, 262_145, 16, "threads=1024 elements=32 blocks=2 cluster=16"),
        ("forward", 2, 524_289, 16, "piece=16384 threads=512 vectors=2"),
        ("forward", 4, 65_536, 16, "threads=512 elements=32 blocks=2 cluster=4"),
        ("forward", 4, 131_072, 16, "threads=512 elements=32 blocks=2 cluster=8"),
        ("forward", 4, 200_000, 16, "threads=1024 elements=16 blocks=2 cluster=16"),
        ("forward", 4, 200_000, 8, "threads=1024 elements=32 blocks=1 cluster=8"),
        ("forward", 4, 524_288, 16, "threads=1024 elements=32 blocks=1 cluster=16"),
        ("forward", 4, 1_000_000, 16, "piece=16384 threads=512 vectors=2"),
        ("backward", 2, 131_073, 16, "threads=512 elements=32 blocks=2 cluster=16"),
        ("backward", 2, 262_144, 8, "threads=1024 elements=32 blocks=1 cluster=8"),
        ("backward", 4, 131_072, 16, "threads=1024 elements=16 blocks=1 cluster=8"),
        ("backward", 4, 262_144, 16, "threads=1024 elements=16 blocks=1 cluster=16"),
        ("backward", 4, 262_144, 8, "piece=16384 threads=512 vectors=2"),
        ("backward", 4, 131_072, 1, "piece=16384 threads=512 vectors=2"),
    ],
)
def test_the_default_follows_from_the_bytes_of_a_row(step, itemsize, width, largest, expected):
    """As measured on an H200, and what follows from it beside."""
    assert str(cuda_launch.cuda_candidates(step, itemsize, width, largest)[0]) == expected


@pytest.mark.parametrize("blocks", [4, 2])
def test_terms_are_computed_twice_from_pairs_alone(blocks):
    """One by one, or cast, elements keep their terms, as those of 2 blocks do anyway."""
    half, other = "__half", "__nv_bfloat16"
    cases = (8, half, blocks), (2, half, blocks), (1, half, 2), (8, other, 2)
    for vector, output, expected in cases:
        types = "kSoftmax", "kApart", half, output
        config = cuda_launch._row(512, 32, blocks, cluster=16)
        found = cuda_launch._resident("forward", types, (vector,), config)
        assert found.endswith(f"{vector}, {32 // vector}, 512, {expected}, 16>")


def test_columns_leave_nothing_to_choose():
    columns = torch.empty(3, 19, 8, dtype=torch.bfloat16)
    assert cuda_launch.configs(columns, 1, None) == ()
    assert cuda_launch.configs_backward((True,), columns, columns, 1, columns.dtype) == ()


def test_columns_move_in_pairs_only_where_both_begin_and_step_by_pairs():
    def pairs(input: torch.Tensor, output: torch.dtype = torch.bfloat16) -> bool:
        rows = rows_of(input, 1)
        assert rows is not None and rows.columns
        return cuda_launch._move_in_pairs(rows, (input, torch.empty(input.shape, dtype=output)))

    base = torch.empty(6, 10, 24, dtype=torch.bfloat16)
    assert pairs(base) and pairs(base[:, 1:8]) and pairs(base[:, :, :22])
    assert pairs(base[:1].expand(4, 10, 24))
    assert not pairs(base[:, :, :21])  # the last column of a slice has no neighbour
    assert not pairs(base[:, :, 1:21])  # begins within a pair
    assert not pairs(base[..., ::2])  # neighbours are not side by side
    odd = torch.empty(6, 10, 23, dtype=torch.bfloat16)[:, :, :22]
    assert not pairs(odd)  # every second element of a column
    assert not pairs(base.float(), torch.float32) and not pairs(base, torch.float32)


@pytest.mark.parametrize("inner", [2, 3, 8, 31, 1000])
@pytest.mark.parametrize("width", [1, 2, 32, 33, 512, 513, 2048, 100_000])
def test_columns_in_registers_hold_the_width(width, inner):
    rows = Rows(inner, width, inner, 0, 1, inner, columns=True)
    elements, lanes, warps = cuda_launch.cuda_columns(rows)
    assert 32 % lanes == 0
    assert warps or lanes == 32  # else kernels that differ in nothing would be compiled apart
    assert elements == 0 or elements * max(1, warps * 32 // lanes) >= width
    assert elements > 0 or width > 512
