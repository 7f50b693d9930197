"""Code that computes with sizes, or decides by them: what is ejected is right at every size, by its
kernels or by the reference.
"""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._sympy import functions as of_torch

from fuselab.ejection.decisions import _holds_always
from fuselab.ejection.eject import eject, ejected
from fuselab.ejection.plan import printed
from fuselab.report.eject_text import eject_text
from fuselab.runtime.signature import mismatch


def scaled_attention(q, k, v):
    return ((q @ k.transpose(-2, -1)) * q.size(-1) ** -0.5).softmax(-1) @ v


def rooted_attention(q, k, v):
    return ((q @ k.transpose(-2, -1)) / math.sqrt(k.size(-1))).softmax(-1) @ v


def squared_and_counted(x):
    return (x * x.shape[0] ** 2).sum(-1) + float(x.numel() % 7)


def halved_and_rounded(x):
    half, third = int(x.shape[0] / 2), round(x.shape[1] * 0.3)
    return x.exp() * half + third - math.ceil(x.shape[1] / 3) + math.floor(x.shape[0] * 0.7)


def padded_to_eight(x):
    return F.pad(x, (0, -x.shape[-1] % 8)).exp().sum(-1)


def counted_products(x, weight):
    hidden = F.gelu(x @ weight) * round(x.shape[1] * 0.3)
    return (hidden - abs(x.shape[0] - 9)).softmax(-1) * min(x.shape[0], 5)


def padded_products(x, weight):
    wide = F.pad(x, (0, -x.shape[-1] % 8))
    return (wide @ weight[: wide.shape[-1]]).softmax(-1).sum(0)


def branched(x):
    return (x * 2).sum(-1) if x.shape[-1] > 8 else (x * 3).sum(-1)


def branched_products(x, weight):
    hidden = F.gelu(x @ weight)
    if x.shape[0] % 2 == 0:
        hidden = hidden * 2 + 1
    return hidden.softmax(-1)


def logarithm(x, weight):
    return torch.relu(x @ weight).softmax(-1) / math.log(x.shape[0] + 1.5)


def logarithm_alone(x):
    return torch.relu(x * 2) / math.log(x.shape[0] + 1.5)


def looped(x, weight):
    rows = [torch.relu(x[row] * weight) + row for row in range(x.shape[0])]
    return torch.stack(rows)


def one_row(x, weight):
    hidden = F.gelu(x @ weight).softmax(-1)
    return hidden.view(x.shape[0], -1, 2).sum(-1) + 1


def one_step(cost, row, column):
    """A step of Sinkhorn's iteration: its backward computes the first output again."""
    row = -torch.logsumexp((column[None, :] - cost) / 0.1, 1) * 0.1
    column = -torch.logsumexp((row[:, None] - cost) / 0.1, 0) * 0.1
    return row, column


def size_of_another(x, other):
    return x.sin() * other.shape[-1]


def branched_by_another(x, other):
    return x.exp() * 2 if other.shape[0] > 4 else x.exp()


def more_than_one_row(x, weight):
    hidden = F.gelu(x @ weight)
    return (hidden - hidden.mean(0) if len(x) > 1 else hidden).tanh()


def with_rows(x, other):
    return x * other.mean() if other.numel() else x.sin() + 1


def mean_of_rows(x):
    return x.exp().sum(0) / max(x.shape[0], 1)


def regrouped_by_another(x, other):
    return (x * 2).view(other.shape[0], -1) + 1


def held_codebook(x, codebook):
    """A straight-through estimator: to the codebook, no gradient flows."""
    place = (x[:, None] - codebook).square().sum(-1).argmin(-1)
    return x + (codebook.detach()[place] - x).detach()


def modulated(x, modulation):
    """Each sixth of the modulation's rows is one row, which is repeated."""
    shift, scale, gate, _, _, _ = modulation.chunk(6, 1)
    return x + gate * (F.layer_norm(x, (8,)) * (1 + scale) + shift)


def shapes(*sizes: Sequence[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(tuple(one), generator=generator) for one in sizes]


# A function, the shapes of the example, and others.
CASES: dict[Callable[..., Any], list[list[tuple[int, ...]]]] = {
    scaled_attention: [[(2, 3, 9, 16), (2, 3, 11, 16), (2, 3, 11, 16)], [(3, 2, 5, 8)] * 3],
    rooted_attention: [[(2, 3, 9, 16), (2, 3, 11, 16), (2, 3, 11, 16)], [(3, 2, 5, 8)] * 3],
    squared_and_counted: [[(6, 8)], [(5, 7)], [(13, 40)]],
    halved_and_rounded: [[(6, 8)], [(5, 7)], [(13, 40)]],
    padded_to_eight: [[(6, 13)], [(6, 16)], [(3, 27)]],
    counted_products: [[(6, 8), (8, 12)], [(13, 20), (20, 7)], [(3, 4), (4, 9)]],
    padded_products: [[(6, 13), (16, 12)], [(4, 3), (8, 5)], [(7, 24), (24, 3)]],
    branched: [[(6, 20)], [(6, 8)], [(4, 9)], [(5, 3)]],
    branched_products: [[(6, 8), (8, 12)], [(5, 8), (8, 12)], [(8, 3), (3, 12)]],
    logarithm: [[(6, 8), (8, 12)], [(9, 8), (8, 5)]],
    logarithm_alone: [[(6, 8)], [(9, 8)]],
    looped: [[(3, 8), (8,)], [(5, 9), (9,)]],
    one_row: [[(1, 8), (8, 12)], [(5, 8), (8, 12)]],
    size_of_another: [[(6, 8), (3, 5)], [(4, 3), (2, 9)], [(1, 1), (1, 1)]],
    branched_by_another: [[(6, 8), (7,)], [(6, 8), (3,)], [(2, 3), (5,)]],
    more_than_one_row: [[(6, 8), (8, 12)], [(1, 8), (8, 12)], [(2, 3), (3, 1)]],
    with_rows: [[(6, 8), (3, 2)], [(6, 8), (0, 4)], [(2, 3), (1, 1)]],
    mean_of_rows: [[(6, 8)], [(0, 8)], [(1, 3)]],
    regrouped_by_another: [[(12, 8), (6, 4)], [(6, 4), (8, 2)], [(6, 4), (3, 2)]],
    held_codebook: [[(6, 8), (5, 8)], [(1, 1), (1, 1)], [(3, 2), (9, 2)]],
    modulated: [[(3, 5, 8), (3, 6, 8)], [(2, 7, 8), (2, 6, 8)], [(2, 2, 8), (2, 12, 8)]],
    one_step: [[(20, 30), (20,), (30,)], [(7, 5), (7,), (5,)]],
}


@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_it_is_right_at_other_sizes(function: Callable[..., Any], tmp_path: Path) -> None:
    example, *others = CASES[function]
    name = f"sizes_{function.__name__}"
    eject(function, *shapes(*example), out=tmp_path / name, name=name)
    sys.path.insert(0, str(tmp_path))
    try:
        ejected = getattr(importlib.import_module(name), name)
    finally:
        sys.path.remove(str(tmp_path))
    for sizes in (example, *others):
        args = shapes(*sizes)
        ours, theirs = (_with_gradients(one, args) for one in (ejected, function))
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4, msg=f"at {sizes}")


def _with_gradients(function: Callable[..., Any], args: Sequence[Tensor]) -> list[Tensor]:
    leaves = [one.clone().requires_grad_() for one in args]
    returned = function(*leaves)
    outputs = returned if isinstance(returned, tuple) else (returned,)
    sum(
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum() for output in outputs
    ).backward()
    grads = [one.grad for one in leaves]
    given = torch.tensor([one is not None for one in grads])
    return [*outputs, given, *(one for one in grads if one is not None)]


@pytest.mark.parametrize(
    "function, where",
    [
        (branched, ["width > 8"]),
        (branched_products, ["length % 2 == 0"]),
        (logarithm_alone, ["length + 1.5 == 7.5"]),
        (one_row, ["x.shape[0] == 1"]),
        (branched_by_another, ["other_width > 4"]),
        (more_than_one_row, ["length > 1"]),
        (mean_of_rows, ["length >= 1"]),
        (regrouped_by_another, ["other_length != 0 and length % other_length == 0"]),
        (squared_and_counted, []),
    ],
)
def test_it_says_where_the_kernels_run(
    function: Callable[..., Any], where: list[str], tmp_path: Path
) -> None:
    made = ejected(function, shapes(*CASES[function][0]), {}, f"told_{function.__name__}")
    assert made.facts["where"] == where
    page = made.files["page.md"]
    assert all(f"`{one}`" in page for one in where)
    screen = eject_text({**made.facts, "folder": "kernels", "kept": []})
    assert (f"only where {' and '.join(where)}" in screen) is bool(where)


def test_the_division_by_a_root_of_a_size_joins_the_softmax(tmp_path: Path) -> None:
    """The size is that of a tensor which the softmax's kernel does not read."""
    made = ejected(rooted_attention, shapes(*CASES[rooted_attention][0]), {}, "attend")
    calls = [one["name"] for one in made.facts["pytorch_calls"]]
    assert calls == ["transpose", "matmul", "matmul"]
    assert [len(one["calls"]) for one in made.facts["operators"]] == [2]


def test_a_tensor_whose_size_alone_is_read_has_no_gradient(tmp_path: Path) -> None:
    made = ejected(size_of_another, shapes(*CASES[size_of_another][0]), {}, "by_another")
    assert 'non_differentiable=("other",)' in made.files["op.py"]
    assert "def save(output: Tensor, x: Tensor, other: Tensor)" in made.files["op.py"]
    standalone = ejected(
        size_of_another, shapes(*CASES[size_of_another][0]), {}, "by_another", standalone=True
    )
    assert "non_differentiable=[1]" in standalone.files["launchers.py"]


def test_the_reason_names_the_condition() -> None:
    tensor = torch.ones(3, 8)
    held: dict[str, Callable[..., bool]] = {
        "width > 7": lambda width, **_: width > 7,
        "length % 3 == 0": lambda length, **_: length % 3 == 0,
    }
    assert mismatch((tensor, "length width"), decided=held) is None
    held["math.log2(width) > 3"] = lambda width, **_: math.log2(width) > 3
    reason = mismatch((tensor, "length width"), decided=held)
    assert reason == "the function computes something else where not math.log2(width) > 3"


def split_by_length(x: Tensor, weight: Tensor) -> Tensor:
    if x.shape[0] > 4:
        return torch.sin(x * 2) * weight
    return torch.cos(x * 3) * weight


@pytest.mark.parametrize("standalone", (False, True))
def test_compiled_code_differentiates_what_the_kernels_do_not_take(
    standalone: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way that the code takes at other sizes, another number of dimensions, a dimension that
    broadcasts: inside torch.compile, too, the gradient is autograd's."""
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"split_by_length_{standalone}".lower()
    args = torch.ones(8, 6), torch.ones(6)
    eject(split_by_length, *args, out=tmp_path / name, name=name, standalone=standalone)
    made = getattr(importlib.import_module(name), name)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape, width in (((8, 6), 6), ((3, 6), 6), ((5, 2, 6), 6), ((8, 1), 6), ((6, 6), 1)):
        results = []
        for call in (split_by_length, made, compiled):
            x = torch.linspace(-1, 1, math.prod(shape)).reshape(shape).requires_grad_()
            weight = torch.linspace(0.5, 2, width).requires_grad_()
            output = call(x, weight)
            results.append((output, *torch.autograd.grad(output.square().sum(), (x, weight))))
        for found in results[1:]:
            torch.testing.assert_close(found, results[0], rtol=1e-5, atol=1e-5)


def test_a_condition_that_always_holds_is_none() -> None:
    one, other = sympy.symbols("one other", integer=True, positive=True)
    assert _holds_always(sympy.Ge(one + other, 0))
    assert not _holds_always(sympy.Gt(one, 1))
    assert not _holds_always(sympy.Eq(one, other))


N, M = sympy.symbols("n m", integer=True, positive=True)
TEXTS = {
    "n // 2": of_torch.FloorDiv(N, 2),
    "n % 8": of_torch.Mod(N, 8),
    "-n % 8": of_torch.PythonMod(-N, 8),
    "n ** -0.5": of_torch.FloatPow(of_torch.ToFloat(N), sympy.Float(-0.5)),
    "n ** 2": of_torch.PowByNatural(N, 2),
    "n ** 3": N**3,
    "int(n / 2)": of_torch.TruncToInt(of_torch.IntTrueDiv(N, 2)),
    "math.ceil(n / 3)": of_torch.CeilToInt(of_torch.IntTrueDiv(N, 3)),
    "math.floor(0.7 * n)": of_torch.FloorToInt(0.7 * of_torch.ToFloat(N)),
    "round(0.3 * n)": of_torch.RoundToInt(0.3 * of_torch.ToFloat(N)),
    "n ** 0.5": of_torch.OpaqueUnaryFn_sqrt(of_torch.ToFloat(N)),
    "math.log2(n)": of_torch.OpaqueUnaryFn_log2(of_torch.ToFloat(N)),
    "-(-n // 4)": of_torch.CeilDiv(N, 4),
    "min(5, n)": of_torch.Min(N, 5),
    "abs(n - 9)": sympy.Abs(sympy.Symbol("n", integer=True) - 9),
    "(n > 8) and (m < 3)": sympy.And(sympy.Gt(N, 8), sympy.Lt(M, 3)),
}


@pytest.mark.parametrize("text", TEXTS)
def test_a_size_is_written_as_python(text: str) -> None:
    written = printed(TEXTS[text])
    for sizes in ({"n": 13, "m": 2}, {"n": 4, "m": 5}, {"n": 24, "m": 1}):
        assert eval(written, {"math": math}, sizes) == eval(text, {"math": math}, sizes), written
