"""add's gradient of a broadcast operand: the kernels' sums, who is asked for them, and how often
the upstream gradient is copied (never)."""

from __future__ import annotations

import re
from functools import partial

import pytest
import torch
from pointwise_cases import assert_within_bar, normal

from fuselab.ops import add
from fuselab.ops.add import broadcast_gradient
from fuselab.ops.add.op import OP
from fuselab.ops.add.reference import gradient
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
interpreted = partial(interpreter.run, "fuselab.ops.add.broadcast_gradient:sums_triton")
SUMS = {"triton": broadcast_gradient.sums_triton, "cuda": broadcast_gradient.sums_cuda}
on_gpu = partial(normal, device="cuda")


def check_sums(sums, grad: torch.Tensor, shape: tuple[int, ...], dtype=None) -> None:
    """``sums`` against float64, by the bar that float32's own sum sets."""
    dtype = dtype or grad.dtype
    ours = sums(grad, shape, dtype)
    assert ours.shape == shape and ours.dtype == dtype and ours.is_contiguous()
    exact = grad.double().sum_to_size(shape)
    assert_within_bar(ours, grad.sum_to_size(shape).to(dtype), exact, f"{grad.shape} to {shape}")


@pytest.mark.parametrize(
    ("shape", "whole", "lacks"),
    [
        ((), (3,), False),
        ((1,), (3, 4), False),
        ((2,), (3, 2), True),
        ((4,), (3, 4), True),
        ((1, 4), (3, 4), True),
        ((1, 1, 4), (2, 3, 4), True),
        ((1, 4), (2, 1, 4), True),
        ((3, 4), (2, 3, 4), True),
        ((3, 1), (3, 4), False),
        ((1, 3, 1), (2, 3, 4), False),
        ((2, 1, 4), (2, 3, 4), False),
        ((3, 4), (3, 4), False),
        ((4,), (1, 4), False),
        ((), (1, 1), False),
    ],
    ids=str,
)
def test_what_lacks_leading_dimensions(shape, whole, lacks):
    assert broadcast_gradient.lacks_leading(shape, whole) is lacks


def test_who_is_asked():
    def asked(needs, grad, *shapes):
        return broadcast_gradient.prefer(needs, grad, *shapes, torch.float32, torch.float32)[0]

    long, both = torch.zeros(8192, 512), (True, True)
    assert asked(both, long, (8192, 512), (512,)) == "cuda"
    assert asked(both, long, (8192, 1), (1, 512)) == "cuda"
    assert asked((True, False), long, (8192, 512), (512,)) == "reference"
    assert asked(both, long, (8192, 1), (8192, 512)) == "reference"
    assert asked(both, long, (8192, 512), (1,)) == "reference"
    assert asked(both, long[1:], (8191, 512), (512,)) == "reference"  # short of 2^22
    assert asked(both, long.view(2048, 2048), (2048, 2048), (2048,)) == "cuda"
    assert asked(both, long.view(1024, 4096), (1024, 4096), (4096,)) == "reference"
    assert asked(both, long.t(), (512, 8192), (8192,)) == "reference"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_element_is_in_one_sum(monkeypatch, dtype):
    """The launches of three multiprocessors, carried out by what the kernels say they do."""

    class Source:
        def launch(self, expression, grid, block, args):
            from_, into, *numbers = args
            count, width = (number.value for number in numbers)
            if expression.startswith("column_sums"):
                assert block == (8, 128, 1) and grid[0] * 8 >= width
                into.copy_(from_.view(count, width).sum(0).view(into.shape))
                return
            pack, threads, unroll = map(int, re.findall(r", (\d+)", expression))
            assert block[0] * block[1] == threads and (block[0] - 1) & block[0] == 0
            assert grid[0] * block[0] * pack >= width and width % pack == 0
            assert count * width == grad.numel() and into.numel() == grid[1] * width
            block_of_row = torch.arange(count) // (unroll * block[1]) % grid[1]
            assert torch.equal(block_of_row.unique(), torch.arange(grid[1]))
            matrix = from_.view(count, width).double()
            sums = matrix.new_zeros(grid[1], width).index_add_(0, block_of_row, matrix)
            into.view(grid[1], width).copy_(sums)

    monkeypatch.setattr(broadcast_gradient, "CUDA_SUMS", Source())
    monkeypatch.setattr(broadcast_gradient, "multiprocessors", lambda device: 3)
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 127, 129, 2051, 2052):
        for columns in (2, 13, 32, 33, 260):
            grad = torch.randint(-4, 5, (rows, columns), generator=generator).to(dtype)
            ours = broadcast_gradient.sums_cuda(grad, (columns,), torch.float32)
            assert torch.equal(ours, grad.float().sum(0)), (rows, columns)


@pytest.mark.parametrize("rows", [2, 3, 127, 128, 129, 513])
@pytest.mark.parametrize("shape", [(2,), (17,), (2, 3)], ids=str)
def test_sums_interpreted(rows, shape):
    check_sums(interpreted, normal(rows, *shape, dtype=torch.float32), shape)


def test_sums_to_another_dtype_interpreted():
    grad = normal(40, 3, dtype=torch.float32)
    check_sums(interpreted, grad, (3,), torch.float16)
    check_sums(interpreted, grad.double(), (1, 3))


def test_first_and_second_derivatives():
    def leaf(*shape: int) -> torch.Tensor:
        return normal(*shape, dtype=torch.float64, seed=len(shape)).requires_grad_()

    for pair in ((leaf(7, 1), leaf(1, 9)), (leaf(4, 3), leaf(3)), (leaf(4, 3), leaf())):
        assert torch.autograd.gradcheck(lambda *both: add(*both) ** 2, pair)
        assert torch.autograd.gradgradcheck(lambda *both: add(*both) ** 2, pair)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(2,), (3,), (12,), (13,), (4, 8), (33,), (512,), (513,)], ids=str
)
def test_sums_on_a_gpu(shape, dtype):
    for rows in (2, 3, 127, 128, 129, 1023, 1024, 1028, 4097, 12_000, 12_001):
        grad = on_gpu(rows, *shape, dtype=dtype)
        check_sums(broadcast_gradient.sums_cuda, grad, shape)
    check_sums(broadcast_gradient.sums_cuda, grad, (1, *shape), torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2,), (13,), (513,)], ids=str)
def test_tritons_sums_on_a_gpu(shape, dtype):
    for rows in (2, 127, 128, 129, 12_001):
        check_sums(broadcast_gradient.sums_triton, on_gpu(rows, *shape, dtype=dtype), shape)


@pytest.mark.gpu
@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
def test_unaligned_memory_and_special_values(sums):
    for rows in (1000, 5000):
        flat = on_gpu(rows * 64 + 1, dtype=torch.float16)[1:]
        check_sums(sums, flat.view(rows, 64), (64,))
        grad = on_gpu(rows, 64, dtype=torch.float32)
        grad[rows // 2, 3], grad[rows - 1, 5] = float("nan"), float("inf")
        grad[0, 6], grad[rows - 1, 6] = float("inf"), float("-inf")
        check_sums(sums, grad, (64,))
        equal = torch.full((rows, 64), 0.1, device="cuda")
        assert torch.equal(sums(equal, (64,), torch.float32), equal.double().sum(0).float())


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["auto", "triton", "cuda"])
def test_gradients_on_a_gpu(implementation):
    for shapes in (((8193, 512), (512,)), ((8193, 512), ()), ((8193, 1), (1, 512)), ((7, 1), (9,))):
        pair = [on_gpu(*shape, dtype=torch.float32).requires_grad_() for shape in shapes]
        upstream = on_gpu(*torch.broadcast_shapes(*shapes), dtype=torch.float32, seed=2)
        for _ in range(3):  # the second call records a plan, the third runs it
            with strict():
                output = add(*pair, implementation=implementation)
                ours = torch.autograd.grad(output, pair, upstream)
            for tensor, grad in zip(pair, ours, strict=True):
                check_sums(lambda *_, grad=grad: grad, upstream, tuple(tensor.shape))
                is_upstream = grad.data_ptr() == upstream.data_ptr()
                assert is_upstream == (tensor.shape == upstream.shape)


@pytest.mark.gpu
@pytest.mark.parametrize("implementation", ["triton", "cuda"])
@pytest.mark.parametrize("name", [case.name for case in OP.cases if "boundary" in case.tags])
def test_gradients_of_boundary_cases_on_a_gpu(name, implementation):
    case = next(case for case in OP.cases if case.name == name)
    inputs = case.make(torch.device("cuda"), torch.float32, torch.Generator().manual_seed(0))
    pair = [tensor.detach().requires_grad_() for tensor in inputs.args]
    output = add(*pair, implementation=implementation)
    upstream = on_gpu(*output.shape, dtype=torch.float32, seed=3)
    ours = torch.autograd.grad(output, pair, upstream)
    saved = OP.gradient.save(output, *pair)
    eager, exact = (gradient((True, True), up, *saved) for up in (upstream, upstream.double()))
    for one, two, three, tensor in zip(ours, eager, exact, pair, strict=True):
        assert one.dtype == tensor.dtype
        assert_within_bar(one, two, three.double(), name)


@pytest.mark.gpu
def test_sums_repeat_to_the_bit_and_in_a_graph():
    input, row = on_gpu(8193, 512, dtype=torch.float32), on_gpu(512, dtype=torch.float32)
    upstream, row = on_gpu(8193, 512, dtype=torch.float32, seed=2), row.requires_grad_()

    def backward() -> torch.Tensor:
        with strict():
            return torch.autograd.grad(add(input, row), row, upstream)[0]

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first = [backward() for _ in range(3)]
    torch.cuda.synchronize()
    assert all(torch.equal(first[0], other) for other in first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = backward()
    upstream.mul_(2)  # doubles every rounded number
    for _ in range(2):
        graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, 2 * first[0])


@pytest.mark.gpu
@pytest.mark.parametrize("columns", [1024, 1023])
@pytest.mark.parametrize("sums", SUMS.values(), ids=SUMS)
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(sums, columns):
    rows = 2**31 // columns + 3
    grad = torch.ones(rows, columns, dtype=torch.bfloat16, device="cuda")
    grad[-1] = torch.arange(columns, device="cuda").to(torch.bfloat16)
    expected = rows - 1 + grad[-1].float()
    assert torch.equal(sums(grad, (columns,), torch.float32), expected)
