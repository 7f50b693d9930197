"""Masks of which a part is known, such as a triangle of ones, and conditions joined with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import compare, compare_cpp, compare_interpreted
from cuda_on_cpu import Emulator
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op


def causal(x):
    hidden = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
    return (x * 0.125).masked_fill(hidden, -2.0).exp()


def lower(x):
    keep = torch.ones_like(x, dtype=torch.bool).tril()
    return torch.where(keep, x, 0.0) * 2


def negated_where_positive(x):
    return torch.where((x > 0) ^ torch.ones_like(x, dtype=torch.bool), x, -x)


def equal_conditions(x):
    always = torch.ones_like(x, dtype=torch.bool)
    return torch.where((x > 0) == always, x, 3 * x) + torch.where((x > 1) != always, x, x.exp())


def never(x):
    none = torch.zeros_like(x, dtype=torch.bool)
    return x * (none & (x > 0)) + torch.where(none | (x < 0), x, -x)


def two_triangles(x):
    square = torch.ones(x.shape[-2:], dtype=torch.bool, device=x.device)
    return torch.where(square.tril() & (x > 0) | ~square.tril(2), x, 0.5 * x)


FUNCTIONS = (causal, lower, negated_where_positive, equal_conditions, never, two_triangles)
SHAPES = ((2, 5, 5), (3, 40, 17), (70, 3, 4))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("conditions")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, torch.randn(2, 6, 9), out=path)

    return folder


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_cpp(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    for shape in SHAPES:
        compare_cpp(folders(function), [drawn(shape)])
        compare_cpp(folders(function), [drawn(shape[::-1]).transpose(0, 2)])


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_interpreted_triton(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    compare_interpreted(folders(function), [drawn((2, 9, 7))])


def test_emulated_cuda(
    folders: Callable[[Any], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    op = load_op(str(folders(two_triangles)))
    cuda, x = op.implementations["cuda"], drawn((2, 9, 7))
    with emulator.collecting():
        output = cuda.forward(x)
        cuda.backward([True], torch.ones_like(output), *op.gradient.save(output, x))
    compare(op, cuda.forward, cuda.backward, [x])
