"""Functions made of slices, joins, chosen elements, integers and rarer scalar functions.

Each is ejected, and its Triton kernels run interpreted against autograd in float64; some run in C++
too.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare
from cuda_on_cpu import Emulator
from torch import Tensor

import fuselab
from fuselab.ejection.eject import eject
from fuselab.ejection.package import planned_package
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def gated_halves(x, bias):
    value, gate = (x + bias).chunk(2, dim=-1)
    return value * F.silu(gate)


def glu(x):
    return F.glu(x, 1)


def rotary_halves(q, cos, sin):
    first, second = q.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def rotary_interleaved(q, cos, sin):
    even, odd = q[..., ::2], q[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)


def normalized_join(x, y, weight):
    joined = torch.cat((x, y), dim=-1)
    return F.layer_norm(joined, joined.shape[-1:]) * weight


def padded(x):
    return torch.exp(F.pad(x, (1, 2, 0, 1), value=0.5))


def differences(x):
    return (x[:, 1:] - x[:, :-1]).square().mean()


def overwritten(x):
    y = x * 2
    y[:, 1:3] = x[:, :2].exp()
    return y.sin()


def third_elements(x):
    return x[:, 1::3] * x.roll(1, -1)[:, ::3] + x[:, 0:1]


def three_heads(x, bias):
    q, k, v = (x + bias).view(2, 5, 3, 2, 3).unbind(2)
    return (q * k + torch.sigmoid(v)).transpose(1, 2)


def causal(scores):
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
    return torch.softmax(scores.masked_fill(hidden, float("-inf")), -1)


def repeated(x):
    return torch.tril(x.repeat(2, 3).sin())


def largest_and_its_place(x):
    return x.max(-1).values + x.argmin(-1) + x.argmax() + x.amax()


def counts(x):
    return (x > 0).sum(-1) + (x > 1).any(-1) + (x > -1).all(-1)


def weighted_cross_entropy(logits, target, weight):
    return F.cross_entropy(
        logits, target, weight.detach().abs(), ignore_index=2, label_smoothing=0.2
    )


def picked(logits, chosen):
    return torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1)


def scalar_functions(x, y):
    hyperbolic = torch.sinh(x) + torch.cosh(x) * torch.asinh(x) + torch.atanh(torch.tanh(x) * 0.5)
    logarithms = torch.log2(x.abs() + 1) + torch.log10(x.abs() + 2) + torch.exp2(x)
    angles = torch.atan2(x, y) + torch.hypot(x, y) + torch.tan(x * 0.3)
    special = torch.lgamma(y) + torch.digamma(x * 2) + torch.erfinv(torch.tanh(y) * 0.9)
    inverse = torch.acosh(y.abs() + 1.5)
    return hyperbolic + logarithms + angles + special + torch.erfc(x) + inverse + F.rrelu(y)


def divisions(x, y):
    by = y.detach().abs() + 0.5
    whole = torch.div(x * 9, by, rounding_mode="floor") + torch.div(x, by, rounding_mode="trunc")
    rounded = torch.round(x, decimals=1) + torch.round(y * 40, decimals=-1)
    signs = torch.signbit(x * 0) + torch.copysign(y, x.round())
    remainders = torch.fmod(x * 7, y) + torch.remainder(x * 7, by) + torch.frac(x) * x
    return whole + remainders + rounded + signs


def integers(one, other):
    quotient = (
        (one - 20) // (other - 8) + (one - 20) % (other + 1) + torch.fmod(one - 20, other + 1)
    )
    is_large = (one > 20).amax(-1, keepdim=True) & (one > 1).amin(-1, keepdim=True)
    bits = ((one & other) ^ (one | 3)) + (one << 2) + (one >> 1)
    return quotient + bits + is_large + (one - 20).relu()


def finite(x):
    broken = x / x.relu()
    replaced = torch.nan_to_num(broken, nan=0.5, posinf=3.0, neginf=-2.0)
    return replaced * torch.isfinite(broken) * x + x.log().nansum(-1, keepdim=True)


def group_norm_silu(x, weight, bias):
    return F.silu(F.group_norm(x, 4, weight, bias))


EXAMPLES: dict[Callable[..., Any], tuple[Any, ...]] = {
    gated_halves: ((4, 6, 16), (16,)),
    glu: ((3, 8, 5),),
    rotary_halves: ((2, 3, 5, 8), (5, 4), (5, 4)),
    rotary_interleaved: ((2, 5, 3, 8), (5, 1, 4), (5, 1, 4)),
    normalized_join: ((4, 6), (4, 5), (11,)),
    padded: ((2, 5, 6),),
    differences: ((5, 8),),
    overwritten: ((5, 8),),
    third_elements: ((5, 9),),
    three_heads: ((2, 5, 18), (18,)),
    causal: ((2, 3, 6, 6),),
    repeated: ((3, 4),),
    largest_and_its_place: ((4, 6),),
    counts: ((4, 6),),
    weighted_cross_entropy: ((7, 6), 6, (6,)),
    picked: ((7, 6), (6, 1)),
    scalar_functions: ((4, 6), (4, 6)),
    divisions: ((4, 6), (4, 6)),
    integers: (50, 7),
    finite: ((4, 6),),
    group_norm_silu: ((2, 8, 5, 6), (8,), (8,)),
}


def arguments(function: Callable[..., Any]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    if function is integers:
        return [torch.randint(0, high, (4, 6), generator=generator) for high in (50, 7)]
    made = [
        torch.randint(0, 6, (7,), generator=generator)
        if isinstance(shape, int)
        else torch.randn(shape, generator=generator)
        for shape in EXAMPLES[function]
    ]
    if function is picked:
        made[1] = torch.randint(0, 6, (7, 1), generator=generator)
    return made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("breadth")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, *arguments(function), out=path)

    return folder


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda function: function.__name__)
def test_interpreted_triton(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    folder = folders(function)
    op = load_op(str(folder))
    args = arguments(function)
    assert op.implementations["triton"].supports(*args) is None
    compare(
        op,
        lambda *args: interpreter.run(f"{folder}/op.py:forward_triton", *args),
        lambda *args: interpreter.run(f"{folder}/op.py:backward_triton", *args),
        args,
    )


COMPILED = (
    rotary_interleaved,
    largest_and_its_place,
    weighted_cross_entropy,
    scalar_functions,
    integers,
)


def test_emulated_cuda(
    folders: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA C++ of all functions is compiled for the CPU together, then run."""
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    declared = {function: load_op(str(folders(function))) for function in COMPILED}
    with emulator.collecting():
        for function, op in declared.items():
            cuda, args = op.implementations["cuda"], arguments(function)
            output = cuda.forward(*args)
            if op.gradient is not None:
                needs = [one.is_floating_point() for one in args]
                cuda.backward(needs, torch.ones_like(output), *op.gradient.save(output, *args))
    for function, op in declared.items():
        cuda = op.implementations["cuda"]
        compare(op, cuda.forward, cuda.backward, arguments(function))


@pytest.mark.parametrize("function", COMPILED, ids=lambda function: function.__name__)
def test_cpp(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    op = load_op(str(folders(function)))
    cpp = op.implementations["cpp"]
    compare(op, cpp.forward, cpp.backward, arguments(function))


def test_formulas_take_layouts_that_the_example_has_not(tmp_path: Path) -> None:
    """A transposed tensor is copied where the contiguous example has a view, and made contiguous
    where PyTorch's group norm would refuse its order."""
    shapes = ((2, 8, 16, 16), (8,), (8,))
    generator = torch.Generator().manual_seed(3)
    x, weight, bias = (torch.randn(one, generator=generator).double() for one in shapes)
    folder = eject(group_norm_silu, x, weight, bias, out=tmp_path / "normed", name="kept_norm")
    op = load_op(str(folder))
    function = fuselab.operator(op)
    assert op.residuals is not None
    odd = x[:1, :, :2, :2].permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[:, ::2]
    scale, shift = weight[::2], bias[::2]
    for given in ((x.transpose(2, 3), weight, bias), (odd, scale, shift)):
        leaves = [one.detach().requires_grad_() for one in given]
        op.residuals(*given)
        found, exact = (
            torch.autograd.grad(
                torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)[0].sum(),
                leaves,
                allow_unused=True,
            )
            for y in (function(*leaves), group_norm_silu(*leaves))
        )
        for one, right in zip(found, exact, strict=True):
            if right is not None:
                torch.testing.assert_close(one, right, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    ("function", "forward", "backward"),
    [
        (gated_halves, 1, 2),  # the gradient of the bias is a sum over the rows
        (glu, 1, 1),
        (rotary_interleaved, 1, 2),
        (weighted_cross_entropy, 2, 3),
        (group_norm_silu, 1, 2),
    ],
)
def test_the_number_of_kernels(function: Callable[..., Any], forward: int, backward: int) -> None:
    package = planned_package(function, arguments(function), {}, function.__name__)
    assert (len(package.forward), len(package.backward)) == (forward, backward)


def test_the_halves_of_a_tensor_are_views_made_by_the_launcher(
    folders: Callable[[Any], Path],
) -> None:
    text = (folders(glu) / "op.py").read_text("utf-8")
    assert '(x.narrow(1, 0, length // 2), "batch length_part width"),' in text
    assert '(grad_x.narrow(1, length // 2, length // 2), "batch length_part width"),' in text
    assert 'multiples={"length": 2},' in text


def test_sizes_that_the_slices_do_not_hold_for_take_the_reference(
    folders: Callable[[Any], Path],
) -> None:
    supports = load_op(str(folders(overwritten))).implementations["triton"].supports
    assert supports(torch.ones(5, 3)) is None
    assert supports(torch.ones(5, 2)) == "width is 2, which is below 3"
    halves = load_op(str(folders(rotary_halves))).implementations["triton"].supports
    q, cos = torch.ones(2, 3, 5, 8), torch.ones(5, 4)
    assert halves(q, cos, cos) is None
    assert halves(q, cos[:, :1], cos) == (
        "argument 2 has a dimension of size 1, which is not width//2"
    )


def test_the_weights_of_classes_are_constants() -> None:
    """PyTorch has no gradient of cross entropy for them, and raises if they require one."""

    def weighted(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, weight)

    args = torch.randn(7, 6), torch.zeros(7, dtype=torch.int64), torch.ones(6)
    package = planned_package(weighted, args, {}, "weighted")
    assert [gradient is not None for gradient in package.captured.gradients] == [True, False, False]
