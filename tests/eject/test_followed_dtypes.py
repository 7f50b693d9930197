"""Dtypes that the user's code takes from its arguments, in packages called with other dtypes."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuselab.ejection.capture import trace
from fuselab.ejection.eject import eject
from fuselab.ejection.followed_dtypes import follow_dtypes
from fuselab.prove.load import load_op

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


class Norm(nn.Module):
    """LLaMA's RMS norm, which computes in float32 and returns the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * x.to(dtype)


def gated(x: Tensor, weight: Tensor) -> Tensor:
    """A softmax in float32 before a product, and a tensor that is made behind it."""
    scores = x.float().softmax(-1) * 2
    product = scores.to(x.dtype) @ weight
    ones = torch.ones(x.shape[0], 1, dtype=x.dtype, device=x.device)
    return torch.cat((product.relu() * 2, ones), 1)


def tolerance(dtype: torch.dtype) -> dict[str, Any]:
    return {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}


def test_dtypes_of_the_arguments_and_named_ones() -> None:
    traced = trace(Norm(), (torch.ones(3, 8),), {}, "norm")
    follow_dtypes(traced, inference=False)
    found = [node.meta.get("follows") for node in traced.traced.graph.nodes if node.target == "to"]
    assert found == [None, torch.float32]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_module_returns_the_dtype_of_its_input(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"norm_{str(dtype)[6:]}"
    eject(Norm(), torch.ones(3, 8), out=tmp_path / label, name=label)
    original = Norm().to(dtype)
    made = importlib.import_module(f"{label}.module").Norm(original)
    x = torch.linspace(-2, 2, 40).reshape(5, 8).to(dtype)
    reference = importlib.import_module(f"{label}.reference").reference
    for found in (made(x), reference(x, original.weight)):
        torch.testing.assert_close(found, original(x), **tolerance(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_product_of_what_has_the_dtype_of_an_argument(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"gated_{str(dtype)[6:]}"
    eject(gated, torch.ones(4, 8), torch.ones(8, 6), out=tmp_path / label, name=label)
    made = getattr(importlib.import_module(label), label)
    x = torch.linspace(-2, 2, 24).reshape(3, 8).to(dtype).requires_grad_()
    weight = torch.linspace(-1, 1, 48).reshape(8, 6).sin().to(dtype)
    found, expected = made(x, weight), gated(x, weight)
    torch.testing.assert_close(found, expected, **tolerance(dtype))
    (mine,) = torch.autograd.grad(found.sum(), x)
    (theirs,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(mine, theirs, **tolerance(dtype))


def rounded_norm(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x.abs() + 0.5, dim=-1).to(torch.float16)


def test_gradients_of_a_rounded_result_are_as_exact_as_the_arguments(tmp_path: Path) -> None:
    eject(rounded_norm, torch.randn(3, 4, requires_grad=True), out=tmp_path / "rounded_norm")
    op = load_op(str(tmp_path / "rounded_norm"))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(3, 4).half()
    (expected,) = torch.autograd.grad(rounded_norm(x), x, upstream)
    given = x.detach()
    kernels = op.implementations["cpp"]
    saved = op.gradient.save(kernels.forward(given), given)
    (found,) = kernels.backward((True,), upstream, *saved)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def log_of_clamped(p: Tensor, scale: Tensor) -> Tensor:
    """Logarithms of probabilities as ``torch.distributions`` has them."""
    eps = torch.finfo(p.dtype).eps
    return p.clamp(min=eps, max=1 - eps).log() * scale


def clamped_in_half(x: Tensor, scale: Tensor) -> Tensor:
    """A way that the code takes in one dtype alone, as that of T5's layers."""
    if x.dtype == torch.float16:
        x = x.clamp(-0.5, 0.5)
    return torch.exp(x * 2) * scale


@pytest.mark.parametrize("function", (log_of_clamped, clamped_in_half))
@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
def test_code_that_decides_by_a_dtype(
    function: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"{function.__name__}_{str(dtype)[6:]}"
    eject(function, torch.rand(4, 8), torch.ones(8), out=tmp_path / label, name=label)
    made = getattr(importlib.import_module(label), label)
    p = torch.tensor([[0.0, 1e-9, 0.25, 0.5, 0.75, 0.9, 1.0, 1.0]]).repeat(3, 1).to(dtype)
    scale = torch.linspace(0.5, 2, 8).to(dtype)
    results = []
    for call in (made, function, torch.compile(made, backend="eager", fullgraph=True)):
        leaf = p.clone().requires_grad_()
        output = call(leaf, scale)
        output.sum().backward()
        results.append((output, leaf.grad))
    for found in (results[0], results[2]):
        torch.testing.assert_close(found, results[1], **tolerance(dtype))


def test_kernels_run_in_the_dtypes_that_make_the_same_calls(tmp_path: Path) -> None:
    args = torch.rand(4, 8), torch.ones(8)
    ways = {log_of_clamped: {torch.float32}, clamped_in_half: set(DTYPES)}
    for function, taken in ways.items():
        folder = eject(function, *args, out=tmp_path / function.__name__)
        cpp = load_op(str(folder)).implementations["cpp"]
        refused = {
            dtype: cpp.supports(*(one.to(dtype) for one in args))
            for dtype in (*DTYPES, torch.float16)
        }
        assert {dtype for dtype, why in refused.items() if why is None} == taken
        assert refused[torch.float16] == "the function computes something else in float16"
        page = (folder / "page.md").read_text()
        assert "{p.dtype, scale.dtype} <= {torch.float32}" in page or function is clamped_in_half


class MaskedScores(nn.Module):
    """Attention's scores with the least number of their dtype where a mask hides them; a branch by
    the dtype before them, if ``decides``."""

    def __init__(self, decides: bool) -> None:
        super().__init__()
        self.decides = decides
        self.keys = nn.Linear(8, 6, bias=False)
        self.slopes = nn.Parameter(torch.linspace(0.5, 1, 6))

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        if self.decides and x.dtype == torch.float16:
            x = x.clamp(-1, 1)
        scores = self.keys(x) * self.slopes
        return scores.masked_fill(hidden, torch.finfo(scores.dtype).min) * 0.5


@pytest.mark.parametrize("dtype", (*DTYPES, torch.float16), ids=str)
@pytest.mark.parametrize("decides", (False, True))
def test_a_module_with_the_limits_of_its_dtype(
    decides: bool, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    label = f"masked_{'deciding_' * decides}{str(dtype)[6:]}"
    original = MaskedScores(decides)
    hidden = torch.tensor([[False, True, False, False, True, True]]).expand(5, 6)
    eject(original, torch.ones(5, 8), hidden, out=tmp_path / label, name=label)
    original.to(dtype)
    made = importlib.import_module(f"{label}.module").MaskedScores(original)
    x = torch.linspace(-2, 2, 40).reshape(5, 8).to(dtype)
    if decides and dtype == torch.float16:
        with pytest.raises(ValueError, match="in bfloat16 or float32 or float64 alone; eject it"):
            made(x, hidden)
        return
    found, expected = made(x, hidden), original(x, hidden)
    assert torch.equal(found[hidden], expected[hidden])
    torch.testing.assert_close(found[~hidden], expected[~hidden], **tolerance(dtype))
