"""The C++ kernels of ejected packages against autograd in float64."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
import torch.nn.functional as F

from fuselab.ejection.eject import eject
from fuselab.errors import EjectError

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NAMES = [str(dtype).removeprefix("torch.") for dtype in DTYPES]


def norm(x, residual, weight, bias):
    hidden = x + residual
    return F.gelu(F.layer_norm(hidden, hidden.shape[-1:], weight, bias, 1e-5))


def chain(x, scale, shift, mask):
    return torch.where(mask, torch.relu(x * scale + shift), x - 0.5)


def weighted_total(x, y):
    return (x * y).sum()


def difference(x, y):
    return x * 2 - y


def largest(x):
    return x.amax(0)


def log_weights(x, scale):
    return torch.log_softmax(x * scale, -1)


def weights(x, scale):
    return torch.softmax(x * scale, -1)


def counted(x, steps):
    return (steps > 1) + x * steps  # the second parameter is used first


EXAMPLES = {
    norm: ((3, 4, 32), (3, 4, 32), (32,), (32,)),
    chain: ((2, 4, 5, 6), (4, 1, 1), (4, 1, 1), (5, 6)),
    weighted_total: ((4, 7), (4, 7)),
    difference: ((5, 9), (5, 9)),
    largest: ((5, 9),),
    log_weights: ((5, 9), (9,)),
    counted: ((5, 9), (9,)),
}


def example(function, place, shape):
    if function is chain and place == 3:
        return torch.ones(shape, dtype=torch.bool)
    if function is counted and place == 1:
        return torch.arange(shape[0])
    return torch.randn(shape)


@pytest.fixture(scope="module")
def ejected(tmp_path_factory):
    """Return the public function of the package of one of the functions above."""
    made = {}
    folder = tmp_path_factory.mktemp("packages")

    def package_of(function):
        if function not in made:
            inputs = [example(function, *one) for one in enumerate(EXAMPLES[function])]
            path = eject(function, *inputs, out=folder / function.__name__)
            name = f"ejected_{function.__name__}"
            spec = importlib.util.spec_from_file_location(
                name, path / "__init__.py", submodule_search_locations=[str(path)]
            )
            module = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            made[function] = getattr(module, function.__name__)
        return made[function]

    return package_of


def assert_as_exact_as_eager(actual, eager, exact):
    """Assert the bar of ``fuselab check`` over the whole tensor: 4 times the error of eager PyTorch
    in the same dtype, and 2 ulp of the largest value (8 in float64, where exact is rounded)."""
    assert actual.dtype == eager.dtype
    assert actual.shape == eager.shape
    if not exact.numel():
        return
    largest = exact.abs().max().clamp(min=1e-30)
    allowed = 4 * (eager.double() - exact).abs().max()
    allowed += (8 if actual.dtype == torch.float64 else 2) * torch.finfo(actual.dtype).eps * largest
    assert (actual.double() - exact).abs().max() <= allowed


def compare(function, public, inputs):
    """Compare the forward and every gradient with autograd's."""

    def run(call, dtype, **options):
        leaves = [
            one.detach().to(dtype or one.dtype).requires_grad_() if one.is_floating_point() else one
            for one in inputs
        ]
        output = call(*leaves, **options)
        generator = torch.Generator().manual_seed(1)
        upstream = torch.randn(output.shape, generator=generator).to(inputs[0].dtype)
        wanted = [one for one in leaves if one.is_floating_point()]
        return [output, *torch.autograd.grad(output, wanted, upstream.to(output.dtype))]

    exact = run(function, torch.float64)
    eager = run(function, None)
    actual = run(public, None, implementation="cpp")
    for one, other, expected in zip(actual, eager, exact, strict=True):
        assert_as_exact_as_eager(one, other, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES)
@pytest.mark.parametrize("shape", [(3, 4, 32), (2, 5, 1000), (1, 7, 19), (2, 0, 8)], ids=str)
def test_norm(ejected, shape, dtype):
    """Reductions over contiguous columns in the forward, over contiguous rows in the backward."""
    torch.manual_seed(0)
    sizes = (shape, shape, shape[-1:], shape[-1:])
    compare(norm, ejected(norm), [torch.randn(size).to(dtype) for size in sizes])


def test_norm_of_strided_operands(ejected):
    """Transposed, expanded and sliced operands are read in place."""
    torch.manual_seed(0)
    x = torch.randn(7, 40, 6).transpose(1, 2)
    residual = torch.randn(7, 1, 1).expand(7, 6, 40)
    weight, bias = torch.randn(80)[::2], torch.randn(50)[10:]
    compare(norm, ejected(norm), [x, residual, weight, bias])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(2, 4, 5, 6), (1, 3, 16, 33), (40, 2, 3, 1)], ids=str)
def test_a_pointwise_chain_with_a_mask(ejected, shape, dtype):
    torch.manual_seed(0)
    channels = (shape[1], 1, 1)
    inputs = [torch.randn(size).to(dtype) for size in (shape, channels, channels)]
    compare(chain, ejected(chain), [*inputs, torch.randn(shape[2:]) > 0])


@pytest.mark.parametrize("shape", [(4, 7), (3, 100_003), (70_000, 2)], ids=str)
def test_a_total_over_everything(ejected, shape):
    """Threads share the columns of a single row."""
    torch.manual_seed(0)
    compare(weighted_total, ejected(weighted_total), [torch.randn(shape), torch.randn(shape)])


def test_a_total_does_not_depend_on_the_number_of_threads(ejected):
    torch.manual_seed(0)
    inputs = [torch.randn(1000, 999), torch.randn(1000, 999)]
    threads = torch.get_num_threads()
    totals = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            totals.append(ejected(weighted_total)(*inputs, implementation="cpp"))
    finally:
        torch.set_num_threads(threads)
    assert totals[0] == totals[1] == totals[2]


@pytest.mark.parametrize("shape", [(50, 30, 100), (3, 700, 40), (1, 1, 70_000)], ids=str)
def test_sums_over_rows_do_not_depend_on_the_number_of_threads(ejected, shape):
    """The gradients of weight and bias are summed in the pass that computes the gradient of x: in
    several pieces of the rows, over narrow rows, and over one long row."""
    torch.manual_seed(0)
    inputs = [torch.randn(size) for size in (shape, shape, shape[-1:], shape[-1:])]
    compare(norm, ejected(norm), inputs)
    leaves = [one.requires_grad_() for one in inputs]
    threads = torch.get_num_threads()
    gradients = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            output = ejected(norm)(*leaves, implementation="cpp")
            gradients.append(torch.autograd.grad(output.square().sum(), leaves))
    finally:
        torch.set_num_threads(threads)
    for one, other, third in zip(*gradients, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, third)


@pytest.mark.parametrize("shape", [(33, 70), (300, 129), (40, 3)], ids=str)
def test_transposed_operands(ejected, shape):
    """Operands whose rows are neighbours in memory, beside ones whose columns are."""
    torch.manual_seed(0)
    x, y = torch.randn(shape), torch.randn(shape[::-1]).T
    compare(difference, ejected(difference), [x, y])
    compare(difference, ejected(difference), [y, x])
    x[1, 2] = -torch.inf
    torch.testing.assert_close(ejected(difference)(x, y, implementation="cpp"), difference(x, y))


@pytest.mark.parametrize("shape", [(5, 9), (300, 3), (1, 70), (2, 2)], ids=str)
def test_a_maximum_over_rows(ejected, shape):
    torch.manual_seed(0)
    x = torch.randn(shape)
    compare(largest, ejected(largest), [x])
    compare(largest, ejected(largest), [x.T.contiguous().T])
    x[shape[0] // 2, 0] = torch.nan
    x[-1, -1] = -torch.inf
    maxima = ejected(largest)(x, implementation="cpp")
    torch.testing.assert_close(maxima, x.amax(0), rtol=0, atol=0, equal_nan=True)


def test_a_product_is_the_same_wherever_it_is_computed(ejected):
    """A product fused with the subtraction of its maximum would be off by its rounding, here 1e10,
    and its exponential infinite."""
    torch.manual_seed(0)
    x, scale = torch.randn(4, 33, dtype=torch.float64), torch.full((33,), 1e27, dtype=torch.float64)
    output = ejected(log_weights)(x, scale, implementation="cpp")
    torch.testing.assert_close(output, log_weights(x, scale), rtol=1e-14, atol=0)


def test_an_infinite_sum(ejected):
    x, y = torch.ones(100), torch.ones(100)
    x[3] = torch.inf
    inputs = [x.view(10, 10), y.view(10, 10)]
    assert ejected(weighted_total)(*inputs, implementation="cpp") == torch.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
def test_integers_and_comparisons(ejected, dtype):
    torch.manual_seed(0)
    x, steps = torch.randn(6, 21).to(dtype), torch.arange(21)
    compare(counted, ejected(counted), [x, steps])


def test_the_source_reads_like_the_users_code(tmp_path):
    folder = eject(norm, *(torch.randn(size) for size in EXAMPLES[norm]), out=tmp_path / "norm")
    lines = (folder / "cpu_kernels.cpp").read_text().splitlines()
    assert "  sweep<Real, lane>(loops, [&](const auto& rows) {" in lines
    assert "      const auto hidden = x + residual;" in lines
    assert "      return Sum{hidden};" in lines
    assert max(map(len, lines)) <= 100


def test_a_value_that_takes_long_is_computed_once(tmp_path):
    folder = eject(weights, *(torch.randn(one) for one in ((5, 9), (9,))), out=tmp_path / "weights")
    forward = (folder / "cpu_kernels.cpp").read_text().split("// Computes")[1]
    assert forward.count("math::exp(") == 1
    assert forward.count("rows.room()") == 1


def test_the_gradient_of_a_weight_is_summed_with_that_of_the_input(tmp_path):
    folder = eject(norm, *(torch.randn(size) for size in EXAMPLES[norm]), out=tmp_path / "norm")
    text = (folder / "cpu_kernels.cpp").read_text()
    assert text.count("math::erf(") == 2  # forward and backward
    assert "at.add(grad_weight_sum, " in text
    assert "backward_cpp = partial(_backward_summing, _CPP)" in (folder / "op.py").read_text()


def test_a_word_of_cpp_is_no_name_of_an_operator(tmp_path):
    with pytest.raises(EjectError, match="'double' is a word of C\\+\\+"):
        eject(largest, torch.randn(3, 4), out=tmp_path / "double", name="double")
