"""Gradients that PyTorch scatters: of windows that overlap in three dimensions, and of rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, compare_interpreted, imported
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op


def largest(x):
    return F.max_pool3d(F.silu(x), 3, 2, 1) * 2


def largest_far_apart(x):
    return torch.tanh(F.max_pool3d(x, 3, 2, 1, 2))


def mean(x):
    return F.avg_pool3d(F.silu(x), 3, 2, 1, ceil_mode=True, count_include_pad=False).exp()


def sum_of_eight(x):
    return F.avg_pool3d(x * 0.5, 2, 1, divisor_override=1)


def mean_alone(x):
    return F.avg_pool3d(x, 3, 2, 1)


def rows_of(x, places):
    return x[places]


FUNCTIONS = (largest, largest_far_apart, mean, sum_of_eight)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Any], Path]:
    root = tmp_path_factory.mktemp("windows")

    def folder(function: Callable[..., Any]) -> Path:
        path = root / function.__name__
        return path if path.exists() else eject(function, drawn((2, 3, 7, 8, 9)), out=path)

    return folder


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_cpp(function: Callable[..., Any], folders: Callable[[Any], Path]) -> None:
    for x in (
        drawn((2, 3, 7, 8, 9)),
        drawn((1, 2, 5, 6, 40)),
        drawn((2, 9, 7, 8, 3)).transpose(1, 4),
        drawn((2, 4, 5, 6, 7)).to(memory_format=torch.channels_last_3d),
    ):
        compare_cpp(folders(function), [x])


@pytest.mark.parametrize("format_", [torch.contiguous_format, torch.channels_last_3d], ids=str)
def test_interpreted_triton(folders: Callable[[Any], Path], format_: torch.memory_format) -> None:
    compare_interpreted(folders(largest), [drawn((1, 2, 5, 6, 7)).to(memory_format=format_)])


def test_the_order_of_a_scattered_sum_is_told(folders: Callable[[Any], Path]) -> None:
    assert "any order" in (load_op(str(folders(largest))).nondeterministic or "")
    assert load_op(str(folders(mean))).nondeterministic is None


def test_a_backward_without_a_kernel_of_its_own(
    folders: Callable[[Any], Path], tmp_path: Path
) -> None:
    """The gradient is what one call of PyTorch returns."""
    table, places = drawn((7, 5)), torch.tensor([1, 2, 2, 6])
    rows = eject(rows_of, table, places, out=tmp_path / "rows_of")
    for folder, args in ((folders(mean_alone), [drawn((2, 3, 7, 8, 9))]), (rows, [table, places])):
        assert load_op(str(folder)).gradient is not None
        compare_cpp(folder, args)


def test_a_standalone_backward_without_a_kernel_of_its_own(tmp_path: Path) -> None:
    folder = tmp_path / "rows_alone"
    table, places = drawn((7, 5)), torch.tensor([1, 2, 2, 6])
    eject(rows_of, table, places, out=folder, name="rows_alone", standalone=True)
    module = imported(folder)
    leaf = table.requires_grad_()
    (actual,) = torch.autograd.grad(module.rows_alone(leaf, places).square().sum(), leaf)
    (wanted,) = torch.autograd.grad(rows_of(leaf, places).square().sum(), leaf)
    torch.testing.assert_close(actual, wanted)
