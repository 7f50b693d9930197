"""softmax_ and log_softmax_: every kernel where its output is its input."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from softmax_cases import BOUNDARY_WIDTHS, layouts, normal, special_rows
from torch import Tensor

from fuselab import ops
from fuselab.errors import ArgumentError, DifferentiationError
from fuselab.ops.softmax import cpu_launch, cuda_launch, triton_launch
from fuselab.runtime import interpreter
from fuselab.runtime.fallback import strict

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
forms = pytest.mark.parametrize("form", ["softmax", "log_softmax"])
gpu_launchers = pytest.mark.parametrize(
    "launcher", [cuda_launch, triton_launch], ids=lambda module: module.__name__.split(".")[-1]
)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def assert_same(launcher, input: Tensor, dim: int, form: str) -> None:
    """In place gives what out of place gives, bit for bit."""
    expected = launcher.forward(input, dim, None, form)
    ours = input.clone()
    launcher.forward_in_place(ours, dim, form)
    torch.testing.assert_close(ours, expected, rtol=0, atol=0, equal_nan=True)


@forms
@dtypes
def test_cpp_rows(dtype, form):
    for width in (*BOUNDARY_WIDTHS, 4097):
        assert_same(cpu_launch, normal(19, width, dtype=dtype, seed=width), -1, form)
    assert_same(cpu_launch, special_rows(dtype), -1, form)


@forms
@dtypes
def test_cpp_columns(dtype, form):
    for shape, dim in (((2, 5, 7), 1), ((33, 70), 0), ((3, 40, 129), 1), ((1000, 80), 0)):
        assert_same(cpu_launch, normal(*shape, dtype=dtype), dim, form)


@forms
@pytest.mark.parametrize(
    "shape, dim", [((3, 1), -1), ((5, 129), -1), ((2, 40_001), -1), ((70, 33), 0), ((3000, 9), 0)]
)
def test_triton_kernels(shape, dim, form):
    """Under the interpreter, whose arguments are copies: the result is what a launch of
    ``(input, input)`` stored."""
    input = normal(*shape)
    ours = interpreter.run(f"{__name__}:triton_in_place", input, dim, form)
    expected = interpreter.run("fuselab.ops.softmax.triton_launch:forward", input, dim, None, form)
    assert torch.equal(ours, expected)


def triton_in_place(input: Tensor, dim: int, form: str) -> Tensor:
    triton_launch.forward_in_place(input, dim, form)
    return input


# The public functions


@forms
@pytest.mark.parametrize("implementation", ["auto", "cpp", "reference"])
def test_the_input_comes_back_with_its_version_moved(form, implementation):
    function = getattr(ops, f"{form}_")
    for shape, dim in (((4, 30), -1), ((4, 30), 0), ((), 0), ((0, 3), 1), ((3, 0), 1)):
        input = normal(*shape)
        expected, version = getattr(torch, form)(input, dim), input._version
        assert function(input, dim, implementation=implementation) is input
        assert input._version > version
        torch.testing.assert_close(input, expected)


@forms
@pytest.mark.parametrize("layout", layouts())
def test_layouts_keep_their_strides_or_are_refused(form, layout):
    input, dim = layouts()[layout]
    function = getattr(ops, f"{form}_")
    if 0 in input.stride():
        with pytest.raises(ArgumentError, match="share memory"):
            function(input, dim)
        return
    expected, stride = getattr(torch, form)(input, dim), input.stride()
    function(input, dim)
    assert input.stride() == stride
    torch.testing.assert_close(input, expected)


@forms
def test_around_a_view_nothing_is_written(form):
    base = normal(6, 10)
    view, before = base[1:5, 2:8], base.clone()
    getattr(ops, f"{form}_")(view)
    outside = torch.ones(6, 10, dtype=torch.bool)
    outside[1:5, 2:8] = False
    assert torch.equal(base[outside], before[outside])
    assert not torch.equal(base, before)


@forms
def test_refusals(form):
    function = getattr(ops, f"{form}_")
    with pytest.raises(DifferentiationError, match=f"; {form} has one"):
        function(normal(3, 4).requires_grad_())
    with pytest.raises(ArgumentError, match=f"{form}: 'dim' is 2, out of range"):
        function(normal(3, 4), 2)


@forms
def test_autograd_sees_that_a_saved_tensor_changed(form):
    input = normal(3, 4).requires_grad_()
    output = input.exp()
    getattr(ops, f"{form}_")(output.detach())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


# On a GPU


@pytest.mark.gpu
@forms
@gpu_launchers
@dtypes
def test_gpu_rows_and_columns(launcher, dtype, form):
    for width in (1, 7, 256, 1025, 4096, 16384, 65536, 65537, 262144, 1_000_000):
        input = normal(5, width, dtype=dtype).cuda()
        assert_same(launcher, input, -1, form)
    for shape, dim in (((700, 33), 0), ((3, 2000, 40), 1), ((5000, 2, 3), 1), ((2, 9, 640), 1)):
        assert_same(launcher, normal(*shape, dtype=dtype).cuda(), dim, form)


@pytest.mark.gpu
@forms
def test_gpu_in_a_graph(form):
    static = normal(64, 65536).cuda()
    function = partial(getattr(ops, f"{form}_"), implementation="cuda")
    function(static.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function(static)
    static.copy_(normal(64, 65536, seed=5))
    graph.replay()
    torch.testing.assert_close(static.cpu(), getattr(torch, form)(normal(64, 65536, seed=5), -1))


def test_a_lazy_clone_is_written_over_alone():
    """By a held plan too: its memory is the original's until it is first written."""
    original = normal(3, 4)
    kept = original.clone()
    for _ in range(2):
        copy = torch._lazy_clone(original)
        assert ops.softmax_(copy) is copy
        torch.testing.assert_close(copy, torch.softmax(kept, -1))
        torch.testing.assert_close(original, kept, rtol=0, atol=0)
