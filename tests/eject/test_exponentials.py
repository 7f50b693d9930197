"""Softmax and its relatives, whose kernels find the largest element of a row and the sum of
exponentials in one sweep."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, compare_interpreted
from torch import Tensor

import fuselab
from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def softened(x: Tensor) -> Tensor:
    return torch.softmax(x * 2, -1)


def summed(x: Tensor) -> Tensor:
    return torch.logsumexp(x, 1)


def masked(x: Tensor) -> Tensor:
    return torch.log_softmax(x.masked_fill(x > 2.5, -math.inf), 1)


def smoothed(x: Tensor) -> Tensor:
    places = torch.arange(x.shape[0], device=x.device) % x.shape[1]
    return F.cross_entropy(x, places, label_smoothing=0.1, reduction="none")


def entropy(x: Tensor) -> Tensor:
    """Another sum needs the largest element, so that the sweep for it stays."""
    shifted = x - x.amax(1, keepdim=True)
    return shifted.exp().sum(1).log() - (shifted * shifted.exp()).sum(1)


FUNCTIONS = (softened, summed, masked, smoothed)
# Rows in one block, rows of several blocks, and rows that several programs share.
SIZES = ((7, 40), (300, 1), (3, 5000), (1, 70_000))


def values(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) * 3


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    root = tmp_path_factory.mktemp("exponentials")

    def folder(function: Callable[[Tensor], Tensor]) -> Path:
        out = root / function.__name__
        if not out.exists():
            eject(function, values(5, 9), out=out, name=f"exponentials_{function.__name__}")
        return out

    return folder


@pytest.mark.parametrize("function", [softened, summed, masked])
def test_the_largest_and_the_sum_take_one_sweep(
    function: Callable[[Tensor], Tensor], package: Callable[..., Path]
) -> None:
    forward = (package(function) / "triton_kernels.py").read_text("utf-8").split("@triton.jit")[1]
    assert "with_exponentials(" in forward and "SWEEP == 2" not in forward


def test_a_sweep_that_is_needed_in_any_case_sums_up(package: Callable[..., Path]) -> None:
    forward = (package(entropy) / "triton_kernels.py").read_text("utf-8").split("@triton.jit")[1]
    assert "with_exponentials(" not in forward and "SWEEP == 2" in forward
    compare_interpreted(package(entropy), [values(7, 40)])


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_rows_of_any_length(
    function: Callable[[Tensor], Tensor], sizes: tuple[int, int], package: Callable[..., Path]
) -> None:
    compare_interpreted(package(function), [values(*sizes)])


def test_cpp_kernels_compute_the_same(package: Callable[..., Path]) -> None:
    compare_cpp(package(smoothed), [values(7, 40)])


@pytest.mark.parametrize("columns", [40, 5000])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_infinities_and_nan_go_where_eager_pytorch_puts_them(
    function: Callable[[Tensor], Tensor], columns: int, package: Callable[..., Path]
) -> None:
    x = values(8, columns)
    x[0] = -math.inf
    x[1] = math.inf
    x[2, columns // 2] = math.inf
    x[3, : columns // 2] = -math.inf
    x[4, -1] = math.nan
    x[5, 0], x[5, -1] = math.inf, -math.inf
    x[6] = torch.finfo(torch.float32).min
    x[7, columns // 2 :] = torch.finfo(torch.float32).max
    returned = interpreter.run(f"{package(function)}/op.py:forward_triton", x)
    found = load_op(str(package(function))).without_residuals(returned)
    torch.testing.assert_close(found, function(x), rtol=2e-5, atol=2e-5, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_long_rows_on_a_gpu(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype, tmp_path: Path
) -> None:
    eject(function, values(5, 9), out=tmp_path / "long", name=f"long_{function.__name__}")
    operator = fuselab.operator(load_op(str(tmp_path / "long")))
    for rows, columns in ((300, 65_537), (2, 1_000_000), (3000, 1000)):
        x = values(rows, columns).to("cuda", dtype)
        exact = function(x.double())
        found = operator(x, implementation="triton").double()
        near = 1e-5 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, exact, rtol=near, atol=near)
