"""softmax and log_softmax on a GPU: CUDA and Triton kernels over widths, dims, dtypes, strides."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from softmax_cases import (
    BOUNDARY_WIDTHS,
    assert_backward,
    assert_forward,
    assert_right_at_both_ends,
    layouts,
    normal,
    special_rows,
)

from fuselab.ops import softmax
from fuselab.ops.softmax import cuda_launch, triton_launch
from fuselab.ops.softmax.cases import CASES
from fuselab.runtime import tuning
from fuselab.runtime.fallback import strict

pytestmark = pytest.mark.gpu
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype)[6:])
launchers = pytest.mark.parametrize(
    "launcher", [cuda_launch, triton_launch], ids=lambda module: module.__name__.split(".")[-1]
)
forms = pytest.mark.parametrize("form", ["softmax", "log_softmax"])
# Compiling takes nearly all of the time here. Form and dtype enter a kernel where an element is
# widened, its term taken and its result finished, and nothing of how rows are spread depends on
# them; but float64, which has tables of its own. So every place is seen by the SWEPT kinds, and
# every other kind sees a place of each path.
SWEPT = {("softmax", torch.float32), ("log_softmax", torch.bfloat16)}
# Both sides of every table line for blocks and clusters, and beyond the last.
WIDE = tuple(
    width
    for line in (2048, 4096, 8192, 16384, 32768, 65536, 131072, 262144, 524288)
    for width in (line, line + 1)
)


def kinds(name: str, places, few, swept=SWEPT, dtypes=DTYPES):
    """All of ``places`` for the swept kinds, a ``few`` for the others."""
    cases = [
        pytest.param(form, dtype, place, id=f"{form}-{str(dtype)[6:]}-{place}")
        for form in ("softmax", "log_softmax")
        for dtype in dtypes
        for place in (places if (form, dtype) in swept else few)
    ]
    return pytest.mark.parametrize(f"form, dtype, {name}", cases)


@pytest.fixture(autouse=True)
def no_fallback():
    with strict():
        yield


def check(launcher, form: str, input: torch.Tensor, dim: int = -1) -> None:
    """Forward and backward of one input."""
    assert_forward(partial(launcher.forward, form=form), input, dim, form=form)
    grad = normal(*input.shape, dtype=input.dtype, seed=1).cuda()
    output = getattr(torch, form)(input, dim)
    assert_backward(partial(launcher.backward, form=form), output, grad, dim, form=form)


@launchers
@kinds(
    "widths",
    [BOUNDARY_WIDTHS[:15], BOUNDARY_WIDTHS[15:]],
    [(1, 7, 33, 128, 500, 1025)],
    {*SWEPT, ("softmax", torch.float64)},
)
def test_narrow_rows(launcher, form, dtype, widths):
    for width in widths:
        check(launcher, form, normal(131, width, dtype=dtype, seed=width).cuda())


@launchers
@kinds("width", [*WIDE, 1_000_000, 1_000_001], [4096, 8193, 65_536, 131_073, 262_144, 1_000_001])
def test_wide_rows(launcher, form, dtype, width):
    check(launcher, form, normal(3, width, dtype=dtype).cuda())


@forms
@dtypes
def test_rows_that_begin_between_vectors(form, dtype):
    """Nine rows of an odd width begin at every place within 16 bytes, and the last row's last
    vector is not whole. From 1018 to 1024 and 16378 to 16384 wide, the first vector takes the place
    that would have been the last element's."""
    for width in (31, 33, 35, 63, 257, 1017, 1019, 1023, 2049, 10_007, 16_379, 50_257):
        check(cuda_launch, form, normal(9, width, dtype=dtype, seed=width).cuda())
    special = special_rows(dtype, 77).cuda()
    assert_forward(partial(cuda_launch.forward, form=form), special, form=form)
    # Rows of other tensors lie around these.
    inside = normal(40, 257, dtype=dtype).cuda()[8:33]
    assert_forward(partial(cuda_launch.forward, form=form), inside, form=form)


@forms
@dtypes
def test_many_rows_of_a_width_that_fits_no_power_of_two(form, dtype):
    for width in (65, 129, 257, 300, 513, 700, 1023, 1100, 1500, 3000, 5000, 10_007):
        rows = 2**20 // width + 9
        check(cuda_launch, form, normal(rows, width, dtype=dtype, seed=width).cuda())


@launchers
@kinds(
    "shape",
    [
        *((3, width, 40) for width in (2, 31, 32, 33, 63, 64, 65, 128, 129, 511, 513)),
        # Both sides of what one thread holds of a column.
        *((3, width, 40) for width in (8, 9, 12, 13, 16, 17, 19, 20, 21, 24, 25)),
        *((2, width, 40) for width in (1025, 2047, 2048, 2049, 5000)),
        *((3, 100, inner) for inner in (2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 1000)),
        (1, 700, 33),
        (5000, 2, 3),
        (2, 3000, 3),
        (4, 19, 64 * 64),
    ],
    [(3, 19, 40), (3, 100, 7), (3, 513, 40), (2, 2048, 40), (2, 2049, 40), (1, 700, 33)],
)
def test_columns(launcher, form, dtype, shape):
    check(launcher, form, normal(*shape, dtype=dtype).cuda(), 1)


@kinds(
    "width",
    [1, 2, 8, 9, 12, 13, 16, 17, 19, 20, 21, 24, 25, 31, 32],
    [1, 19, 32],
    {("softmax", torch.float16), ("log_softmax", torch.bfloat16)},
    (torch.float16, torch.bfloat16),
)
def test_columns_in_pairs(form, dtype, width):
    """Every number of elements a thread holds; where columns have no neighbour, one by one."""
    base = normal(5, width, 1026, dtype=dtype).cuda()
    special = special_rows(dtype, max(width, 10))[:, -width:].t().contiguous().cuda()
    for input in (
        base,
        base[:, :, :1022],
        base[:, :, 8:30],
        base[:, :, 1:1025],
        base[:, :, :1021],
        base[:1].expand(3, -1, -1),
        special.unsqueeze(0),
    ):
        assert_forward(partial(cuda_launch.forward, form=form), input, 1, form=form)
    written = base.clone()
    cuda_launch.forward_in_place(written, 1, form)
    assert torch.equal(written, cuda_launch.forward(base, 1, None, form))
    for shape in ((5, width, 1026), (1, width, 2), (3, width, 21)):
        output = getattr(torch, form)(normal(*shape, dtype=dtype).cuda(), 1)
        for grad in (normal(*shape, dtype=dtype, seed=1), normal(1, width, shape[2], seed=2)):
            expanded = grad.to("cuda", dtype).expand(shape)
            backward = partial(cuda_launch.backward, form=form)
            assert_backward(backward, output, expanded, 1, form=form)


@forms
@launchers
@dtypes
@pytest.mark.parametrize("width", [70, 1500, 20_000, 100_000, 600_000])
def test_special_values(launcher, dtype, width, form):
    rows = special_rows(dtype, width).cuda()
    forward = partial(launcher.forward, form=form)
    assert_forward(forward, rows, form=form)
    assert_forward(forward, rows.t().contiguous(), 0, form=form)


@launchers
@dtypes
@pytest.mark.parametrize("width", [2, 5000, 300_000])
def test_subnormal_results_stay(launcher, dtype, width):
    """As test_cpp_keeps_subnormal_results; wide rows put the term into another warp or block."""
    limits = torch.finfo(dtype)
    smallest = math.log(limits.smallest_normal) + math.log(0.1)
    for dim in (0, 1):
        input = torch.full((3, width), -math.inf, dtype=dtype, device="cuda")
        input[:, 0] = 0
        input[:, -1] = smallest
        input = input if dim else input.t().contiguous()
        ours = launcher.forward(input, dim, None).movedim(dim, -1)[:, -1].double()
        exact = torch.softmax(input.double(), dim).movedim(dim, -1)[:, -1]
        step = limits.smallest_normal * limits.eps
        # Rounding 90 * log2(e) to float32 alone would cost 7e-6 of the result.
        assert bool(((ours - exact).abs() <= 2 * step + 4 * limits.eps * exact).all())
        assert bool((ours > 0).all())


@launchers
@pytest.mark.parametrize("layout", layouts())
def test_layouts(launcher, layout):
    input, dim = layouts()[layout]
    device_input = input.cuda() if input.numel() < 2 else _moved(input)
    assert_forward(launcher.forward, device_input, dim)
    output = torch.softmax(device_input, dim)
    assert_backward(launcher.backward, output, device_input, dim)  # as an upstream gradient


def _moved(tensor: torch.Tensor) -> torch.Tensor:
    """On the GPU with the same strides and offset."""
    storage = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage()).cuda()
    return storage.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@launchers
@dtypes
def test_casting_dtypes(launcher, dtype):
    """Every pair, by one vector length or the other: a cast is of elements."""
    for place, source in enumerate((*DTYPES, torch.int32)):
        input = (normal(3, (20, 4096)[(place + DTYPES.index(dtype)) % 2]) * 4).to(source).cuda()
        assert_forward(launcher.forward, input, -1, dtype)
        if source.is_floating_point:
            output = torch.softmax(input, -1, dtype=dtype)
            grad = normal(*input.shape, dtype=dtype, seed=1).cuda()
            assert_backward(launcher.backward, output, grad, -1, source)


@launchers
@dtypes
def test_expanded_upstream_gradients(launcher, dtype):
    for width in (11, 4096, 40_000):
        for dim in (0, 1):
            output = torch.softmax(normal(6, width, dtype=dtype).cuda(), dim)
            for grad in (torch.ones(()), normal(6, 1), normal(1, width)):
                assert_backward(
                    launcher.backward, output, grad.to("cuda", dtype).expand(6, width), dim
                )


@launchers
@kinds(
    "width",
    [100, 128, 512, 1000, 4096, 16384, 32768, 65536, 131072, 262144, 1_000_000],
    [4096, 262144],
    dtypes=(torch.float32, torch.bfloat16),
)
def test_every_candidate_of_tuning_is_right(launcher, form, dtype, width):
    implementation = launcher.__name__.split(".")[-1].removesuffix("_launch")
    input = normal(9, width, dtype=dtype).cuda()
    output = getattr(torch, form)(input, -1)
    grad = normal(9, width, dtype=dtype, seed=1).cuda()
    arguments = (True,), grad, output, -1, dtype
    for config in launcher.configs(input, -1, None):
        with tuning.forced(f"fuselab::{form}", implementation, config):
            assert_forward(partial(launcher.forward, form=form), input, form=form)
    for config in launcher.configs_backward(*arguments):
        with tuning.forced(f"fuselab::{form}", f"{implementation}_backward", config):
            assert_backward(partial(launcher.backward, form=form), output, grad, form=form)


@pytest.mark.parametrize("threads, elements, cluster", [(1024, 32, 4), (512, 32, 1)])
def test_terms_computed_twice(threads, elements, cluster):
    """Where registers hold 16-bit elements and not their terms (has_terms_twice)."""
    width = threads * elements * cluster
    config = next(
        one
        for one in cuda_launch.cuda_candidates("forward", 2, width, 8)
        if (one.threads, one.elements, one.blocks) == (threads, elements, 2048 // threads)
    )
    assert config.cluster == cluster
    for form, dtype in (
        ("softmax", torch.bfloat16),
        ("softmax", torch.float16),
        ("log_softmax", torch.bfloat16),
    ):
        forward = partial(cuda_launch.forward, form=form)
        rows = special_rows(dtype, width).cuda()
        rows[7, width // 3 :] = math.nan  # whole threads and warps of nothing else
        narrow = normal(5, width - 11, dtype=dtype).cuda() * 4  # rows that begin anywhere
        with tuning.forced(f"fuselab::{form}", "cuda", config):
            for input in (rows, rows[:, : width - 8], *((narrow,) if form == "softmax" else ())):
                assert_forward(forward, input, form=form)
            written = rows.clone()
            cuda_launch.forward_in_place(written, -1, form)
            assert torch.equal(written.nan_to_num(), forward(rows, -1, None).nan_to_num())
    with tuning.forced("fuselab::softmax", "cuda", config):
        assert_forward(cuda_launch.forward, rows.half(), -1, torch.bfloat16)


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
@pytest.mark.parametrize(
    "shape, dim",
    [((2**21 + 1, 1025), -1), ((3, 2**20, 700), 1), ((1, 2**31 + 9), -1), ((2**31 + 9, 1), -1)],
)
@pytest.mark.large_memory
def test_more_than_2_to_the_31_elements(implementation, shape, dim):
    """Offsets past 32 bits: the last elements are right, and so are the first."""
    if shape == (2**31 + 9, 1) and implementation == "triton":
        pytest.skip("a Triton grid ends at 2^31 - 1 rows; auto takes the CUDA kernel")
    # Input, output and gradient; pieces of 2^27 float64, a handful at a time.
    needed_bytes = 3 * 2 * torch.Size(shape).numel() + 2**33
    if torch.cuda.mem_get_info()[0] < needed_bytes:
        pytest.skip(f"needs {needed_bytes / 2**30:.0f} GiB of free GPU memory")
    input = torch.zeros(shape, dtype=torch.float16, device="cuda")
    torch.manual_seed(0)
    for part in (input.flatten()[:10_000_000], input.flatten()[-10_000_000:]):
        part.copy_(3 * torch.randn(part.shape, device="cuda"))
    input.requires_grad_()
    output = softmax(input, dim, implementation=implementation)
    output.backward(input.detach())
    assert input.grad is not None
    assert_right_at_both_ends(input.detach(), output.detach(), input.grad, dim)
    del output, input
    torch.cuda.empty_cache()


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_runs_on_the_callers_stream_and_in_a_graph(implementation):
    static = normal(64, 4096).cuda()
    softmax(static, implementation=implementation)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = softmax(static, implementation=implementation)
    static.copy_(normal(64, 4096, seed=5))
    graph.replay()
    torch.testing.assert_close(output, torch.softmax(static, -1))


def test_autocast_gives_float32():
    input = normal(5, 100, dtype=torch.float16).cuda()
    with torch.autocast("cuda"):
        assert softmax(input).dtype == torch.softmax(input, -1).dtype == torch.float32


def test_calls_that_hit_a_launch_plan_see_alignment_and_shape():
    """Same kernel arguments but for the tensors: a plan must not outlive what chose its vectors."""
    storage = normal(8 * 64 + 16).cuda()
    for offset in (0, 4, 1, 2, 0, 3):
        input = storage[offset : offset + 512].view(8, 64)
        torch.testing.assert_close(softmax(input), torch.softmax(input, -1))
    for width in (64, 60, 64, 33):
        input = storage[:480].view(-1)[: 4 * width].view(4, width)
        torch.testing.assert_close(softmax(input), torch.softmax(input, -1))


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_cases(implementation):
    for case in CASES:
        inputs = case.make(torch.device("cuda"), torch.float32, torch.Generator().manual_seed(3))
        if inputs.args[0].numel() > 2**24:
            continue
        function = partial(softmax, implementation=implementation)
        assert_forward(function, inputs.args[0], inputs.kwargs.get("dim", -1))
