"""Reductions of everything that are taken row by row, where an operand belongs to a row."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import compare_cpp, compare_interpreted
from torch import Tensor

import fuselab


def quantile_loss(prediction: Tensor, target: Tensor, quantile: Tensor) -> Tensor:
    error = target - prediction
    return torch.maximum(quantile * error, (quantile - 1) * error).mean()


def masked_sum(x: Tensor, mask: Tensor) -> Tensor:
    return (x.square() * mask[:, None]).sum()


def of_channels(x: Tensor, scale: Tensor) -> Tensor:
    return (x * scale[:, None, None]).abs().amax()


def weighted_mean(x: Tensor, weight: Tensor) -> Tensor:
    return (x.tanh() * weight).mean()


def of_one_tensor(x: Tensor, factor: Tensor) -> Tensor:
    return (x.tanh() * factor).mean()


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


# Each with its arguments, and what the first kernel has in its rows and in its columns.
CALLS: dict[Callable[..., Tensor], tuple[list[Tensor], list[str], list[str]]] = {
    quantile_loss: ([normal(300, 40), normal(300, 1), normal(40)], ["length"], ["width"]),
    masked_sum: ([normal(300, 40), normal(300)], ["length"], ["width"]),
    of_channels: ([normal(16, 24, 9, 5), normal(24)], ["batch", "channels"], ["height", "width"]),
    weighted_mean: ([normal(8, 40, 33), normal(33)], ["batch", "length"], ["width"]),
    of_one_tensor: ([normal(300, 40), normal(1)], [], ["length", "width"]),
}


@pytest.mark.parametrize("function", CALLS, ids=lambda function: function.__name__)
def test_rows_and_values(function: Callable[..., Tensor], tmp_path: Path) -> None:
    args, rows, columns = CALLS[function]
    folder = tmp_path / function.__name__
    fuselab.eject(function, *[one.clone().requires_grad_() for one in args], out=folder)
    text = (folder / "op.py").read_text(encoding="utf-8")
    swept = " ".join(text[text.index("swept = Sweep(") : text.index("read=[")].split())
    assert re.findall(r'"(\w+)": ', swept.partition("columns=")[0]) == rows
    assert re.findall(r'"(\w+)": ', swept.partition("columns=")[2]) == columns
    compare_cpp(folder, args)
    compare_interpreted(folder, args)
