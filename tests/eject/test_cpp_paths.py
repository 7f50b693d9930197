"""Paths of the C++ kernels that depend on sizes, layouts and values, against eager PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from comparing import imported

from fuselab.ejection.eject import eject


def losses(logits, target):
    return F.cross_entropy(logits, target, reduction="none", ignore_index=2)


def gated(x, gate):
    return x * torch.sigmoid(gate)


def shares(x):
    return x / x.amax(-1, keepdim=True)


def grouped(x, weight, bias):
    return F.silu(F.group_norm(x, 2, weight, bias))


def causal(scores):
    position = torch.arange(scores.shape[-1], device=scores.device)
    hidden = position[None, :] > position[:, None]
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)


def summed_difference(prediction, target):
    return (prediction - target).square().sum(-1)


def pooled(x):
    return F.max_pool2d(F.relu(x), 3, 2, 1), F.avg_pool2d(x, 3, 1, 1)


def strided(x):
    return F.max_pool2d(x, 3, 2, 1) * F.avg_pool2d(x, (2, 5), 3, (1, 2))[..., :1, :1]


def wide(x):
    return F.pad(x, (40, 40)).unfold(-1, 80, 2).square().mean(-1)


def spread_in_windows(x):
    """The variance in each window needs its mean first, and takes the activations again."""
    return F.silu(x).unfold(-1, 3, 2).var(-1)


def tiled(x):
    return F.avg_pool2d(x, 3) + F.max_pool2d(x * 2, 3)


def mirrored(x):
    return x + 2 * x.flip(-1)


def spread(x, gate, bias):
    return x * torch.sigmoid(gate) + bias


def shifted(x, bias):
    return F.gelu(x + bias)


def bordered(x):
    """Reflect, repeat, wrap and shift positions, so that borders of each kind meet."""
    reflected = F.pad(x, (2, 1, 1, 2), mode="reflect") * 2
    repeated = F.pad(x, (2, 1, 0, 3), mode="replicate")
    return reflected + repeated + F.pad(x.roll(3, -1).tril(1), (3, 0, 2, 1))


def counted_where(x, keep):
    return (x > 0).sum(-1), (keep & (x < 1)).sum((0, 1))


def elementary(x):
    part = torch.frac(x)
    return (
        torch.asin(part),
        torch.acos(part),
        torch.atan(x),
        torch.sinh(x),
        torch.cosh(x),
        torch.tan(x),
        torch.asinh(x),
        torch.acosh(x),
        torch.atanh(part),
        torch.log2(x),
        torch.log10(x),
        torch.exp2(x),
        torch.erfc(x),
        torch.pow(x, x),
        torch.pow(x, 7.5),
        torch.hypot(x, part),
        torch.trunc(x),
    )


EXAMPLES = {
    losses: (torch.zeros(5, 9), torch.tensor([0, 1, 2, 3, 8])),
    gated: (torch.zeros(2, 3, 4, 5), torch.zeros(2, 3, 1, 1)),
    shares: (torch.zeros(5, 9),),
    grouped: (torch.zeros(2, 6, 5, 7), torch.zeros(6), torch.zeros(6)),
    causal: (torch.zeros(2, 9, 9),),
    summed_difference: (torch.zeros(5, 9), torch.zeros(5, 9)),
    pooled: (torch.zeros(2, 3, 9, 11),),
    strided: (torch.zeros(2, 3, 9, 11),),
    wide: (torch.zeros(2, 3, 9, 11),),
    spread_in_windows: (torch.zeros(2, 3, 9, 11),),
    tiled: (torch.zeros(2, 3, 9, 13),),
    mirrored: (torch.zeros(5, 9),),
    spread: (torch.zeros(5, 9), torch.zeros(9), torch.zeros(9)),
    shifted: (torch.zeros(5, 9), torch.zeros(9)),
    bordered: (torch.zeros(2, 3, 9, 11),),
    counted_where: (torch.zeros(2, 3, 9), torch.zeros(2, 3, 9, dtype=torch.bool)),
    elementary: (torch.zeros(9),),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """Return the folder of the package of one of the functions above, and its public function."""
    made = {}
    folder = tmp_path_factory.mktemp("packages")

    def package_of(function):
        if function not in made:
            path = eject(function, *EXAMPLES[function], out=folder / function.__name__)
            made[function] = path, getattr(imported(path), function.__name__)
        return made[function]

    return package_of


@pytest.fixture
def run(package):
    """Call the C++ kernels of a function."""
    return lambda function, *args: package(function)[1](*args, implementation="cpp")


def gradients(call, inputs):
    leaves = [one.clone().requires_grad_() for one in inputs]
    output = call(*leaves)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(output, leaves, upstream.to(output.dtype))


@pytest.mark.parametrize("shape", [(40, 7), (3, 300), (1, 9)], ids=str)
def test_a_gather_reads_one_column(run, shape):
    """Narrow rows lie in the lanes of vectors, and ids that are ignored gather column 0."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(shape, generator=generator)
    target = torch.randint(0, shape[1], shape[:1], generator=generator)
    target[0] = 2
    expected = losses(logits.double(), target).float()
    torch.testing.assert_close(run(losses, logits, target), expected)
    (actual,) = gradients(lambda one: run(losses, one, target), [logits])
    (wanted,) = gradients(lambda one: losses(one, target), [logits])
    torch.testing.assert_close(actual, wanted)


def test_a_gather_is_no_sweep(package):
    text = (package(losses)[0] / "cpu_kernels.cpp").read_text()
    forward = text.split("// Computes")[1]
    assert "sweeps twice over their columns" in forward
    assert forward.count("rows.pick(") == 1


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last], ids=str)
def test_a_value_of_a_whole_row(run, format_):
    """The gate is the same along a row of one layout, and differs from column to column in the
    other."""
    x = torch.randn(2, 19, 9, 9).to(memory_format=format_)
    gate = torch.randn(2, 19, 1, 1)
    torch.testing.assert_close(run(gated, x, gate), gated(x, gate))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("columns", [7, 33, 1024])
def test_quotients_are_rounded_as_divisions(run, columns, dtype):
    """The divisors of the first rows have no useful reciprocal, and infinity has no remainder."""
    tiny = torch.finfo(dtype).tiny
    divisors = torch.tensor([0.0, -0.0, torch.inf, tiny / 8, 1e-37, 3e38, torch.nan], dtype=dtype)
    x = -torch.rand(40, columns, dtype=dtype) * 3
    x[:7] *= 1e30
    x[:7, 3] = divisors
    x[7:, 3] = torch.linspace(0.3, 900, 33, dtype=dtype)
    x[9, 4] = -torch.inf
    torch.testing.assert_close(run(shares, x), shares(x), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("columns", [1024, 1023])
def test_a_result_larger_than_the_caches(run, columns):
    """Aligned rows are written past the caches."""
    x = torch.rand(1100, columns) + 1
    torch.testing.assert_close(run(shares, x), shares(x), rtol=0, atol=0)


def test_masked_scores(run):
    """The exponential of -infinity is 0, in rows of 1 to 70 columns that count."""
    scores = torch.randn(2, 70, 70) * 20
    torch.testing.assert_close(run(causal, scores), causal(scores.double()).float())
    (actual,) = gradients(lambda one: run(causal, one), [scores])
    (wanted,) = gradients(causal, [scores.double()])
    torch.testing.assert_close(actual, wanted.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 35, 70])
def test_windows_that_reach_beyond_a_tensor(package, run, width, dtype):
    """A vector of windows lies inside, or reaches beyond either end; nothing is read there."""
    assert "at.chosen_where(" in (package(pooled)[0] / "cpu_kernels.cpp").read_text()
    x = torch.randn(2, 3, 7, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last)):
        largest, mean = run(pooled, one)
        expected = pooled(one.double())
        assert torch.equal(largest.double(), expected[0])
        torch.testing.assert_close(mean, expected[1].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [2, 17, 35, 160])
def test_windows_that_lie_apart(package, run, width, dtype):
    """An element's windows follow from its position divided by the stride. Long ones are walked in
    phases: few have rows of which every second fills a vector."""
    assert "windows=(" in (package(strided)[0] / "op.py").read_text()
    assert "sweep_in_phases<2, " in (package(wide)[0] / "cpu_kernels.cpp").read_text()
    x = torch.randn(2, 3, 7, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last)):
        for function in (strided, wide):
            (actual,) = gradients(lambda x, function=function: run(function, x), [one])
            (wanted,) = gradients(
                lambda x, function=function: function(x).to(dtype).double(), [one.double()]
            )
            torch.testing.assert_close(actual, wanted.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [3, 16, 35])
def test_elements_that_walk_over_a_window_twice(package, run, width, dtype):
    """The first loop over a window stores values that take long to compute, for the second."""
    text = (package(spread_in_windows)[0] / "cpu_kernels.cpp").read_text()
    assert "silu_kept[3]" in text and "silu_kept[group]" in text
    x = torch.randn(2, 3, 7, width, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last)):
        expected = spread_in_windows(one.double())
        torch.testing.assert_close(run(spread_in_windows, one), expected.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (4, 19), (9, 67)], ids=str)
def test_windows_side_by_side(run, shape, dtype):
    """An element's window is its position divided by the size, in no regular order of the lanes;
    elements behind the last window have no gradient."""
    x = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(run(tiled, one), tiled(one.double()).to(dtype))
        (actual,) = gradients(lambda x: run(tiled, x), [one])
        (wanted,) = gradients(lambda x: tiled(x).to(dtype).double(), [one.double()])
        torch.testing.assert_close(actual, wanted.to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("columns", [1, 15, 16, 17, 100])
def test_elements_that_lie_backwards(run, columns, dtype):
    x = torch.randn(5, columns, generator=torch.Generator().manual_seed(0)).to(dtype)
    for one in (x, x.repeat(1, 2)[:, ::2], x.t().contiguous().t()):
        expected = mirrored(one.double()).to(dtype)
        torch.testing.assert_close(run(mirrored, one), expected)


@pytest.mark.parametrize("shape", [(40, 7), (300, 70), (3, 20_000), (0, 9)], ids=str)
@pytest.mark.parametrize(
    ("function", "words"),
    [(spread, "sweep_with_columns<"), (shifted, "at.add(grad_bias_sum, ")],
    ids=["spread", "shifted"],
)
def test_a_value_of_a_whole_column(package, run, function, words, shape):
    """A gate is computed once for a column, in rows that are not too long, and the gradient of a
    bias is summed with that of x."""
    assert words in (package(function)[0] / "cpu_kernels.cpp").read_text()
    generator = torch.Generator().manual_seed(0)
    x, *rows = (torch.randn(shape[-one.dim() :], generator=generator) for one in EXAMPLES[function])
    across = torch.randn(shape[::-1], generator=generator).t()
    for inputs in ((x, *rows), (across, *rows), (x, *(one[:1].expand(shape[1]) for one in rows))):
        torch.testing.assert_close(run(function, *inputs), function(*inputs))
        actual = gradients(lambda *given: run(function, *given), inputs)
        wanted = gradients(function, [one.double() for one in inputs])
        torch.testing.assert_close(actual, tuple(one.float() for one in wanted))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("shape", [(7, 4), (9, 37), (4, 700)], ids=str)
def test_stretches_between_borders(package, run, shape, dtype):
    """Borders lie within one vector, in two neighbouring ones, and far apart."""
    assert "each_by_stretch(" in (package(bordered)[0] / "cpu_kernels.cpp").read_text()
    x = torch.randn(2, 3, *shape, generator=torch.Generator().manual_seed(0), dtype=dtype)
    for one in (x, x.transpose(2, 3), x.to(memory_format=torch.channels_last)):
        torch.testing.assert_close(run(bordered, one), bordered(one))


@pytest.mark.parametrize("shape", [(2, 3, 9), (4, 50, 700), (1, 33, 4099), (3, 0, 5)], ids=str)
def test_a_count_is_exact(run, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    for one in (x, x.transpose(0, 1)):
        keep = one > -0.5
        for actual, expected in zip(
            run(counted_where, one, keep), counted_where(one, keep), strict=True
        ):
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("columns", [3, 17, 900])
def test_the_largest_of_a_row_is_nan_if_one_is(run, columns):
    x = torch.rand(columns, columns) + 1
    x[torch.arange(columns), torch.arange(columns)] = torch.nan
    assert run(shares, x).isnan().all()


def test_an_expanded_gradient_of_no_rows_is_not_read(run):
    """It is the same in all columns, and there is not one element of it."""
    inputs = [torch.zeros(0, 1, requires_grad=True) for _ in range(2)]
    run(summed_difference, *inputs).sum().backward()
    assert [one.grad.shape for one in inputs] == [(0, 1), (0, 1)]


def test_slow_values_are_handed_from_kernel_to_kernel(package, run):
    """The kernel of the weight's gradient reads the activation's derivative and computes none."""
    text = (package(grouped)[0] / "cpu_kernels.cpp").read_text()
    of_weight = text.split("// Computes")[3]
    assert "grad_weight" in of_weight
    assert "sigmoid" not in of_weight
    assert "rsqrt" not in of_weight
    inputs = [torch.randn(3, 6, 5, 7), torch.randn(6), torch.randn(6)]
    actual = gradients(lambda *given: run(grouped, *given), inputs)
    wanted = gradients(grouped, [one.double() for one in inputs])
    for one, other in zip(actual, wanted, strict=True):
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)


def test_elementary_functions(run):
    """Results are within 3 ulp of those in float64."""
    near = torch.cat([torch.linspace(-9, 9, 4001), torch.logspace(-30, 1.5, 997)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1.0, -1.0, -2.0, -3.0])
    x = torch.cat([near, -near, special])
    for actual, exact in zip(run(elementary, x), elementary(x.double()), strict=True):
        torch.testing.assert_close(actual, exact.float(), rtol=3.6e-7, atol=1e-37, equal_nan=True)


def test_triton_kernels_walk_over_windows_in_unrolled_loops(package):
    """The indices of the largest elements lie in memory in the order of the image."""
    folder = package(pooled)[0]
    text = (folder / "triton_kernels.py").read_text()
    assert "in tl.static_range(" in text and "is_in(" in text
    op = (folder / "op.py").read_text()
    assert "windows=(" in op.split("CppSweeps(")[0].split("_TRITON = TritonSweeps(")[1]
    strided_text = (package(strided)[0] / "op.py").read_text()
    assert "empty_in_order(\n        x," in strided_text
