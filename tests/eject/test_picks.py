"""Sums over a row in which a single column counts, as the loss of cross entropy has them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from comparing import compare_cpp, compare_interpreted
from torch import Tensor

import fuselab
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def capped(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(30 * torch.tanh(logits / 30), target, reduction="none")


def weighted(logits: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, weight.detach(), ignore_index=2)


def on_the_diagonal(logits: Tensor) -> Tensor:
    places = torch.arange(logits.shape[0], device=logits.device)
    return F.cross_entropy(logits * 4, places) + F.cross_entropy(logits.t(), places)


def of_sequences(logits: Tensor, labels: Tensor, counted: Tensor) -> Tensor:
    picked = F.log_softmax(logits[:, :-1], -1).gather(-1, labels[:, 1:, None])[..., 0]
    return (picked * counted[:, 1:]).sum(-1)


def two_of_a_row(logits: Tensor, first: Tensor, second: Tensor) -> Tensor:
    shares = torch.log_softmax(logits, -1)
    return shares.gather(-1, first[:, None]) - shares.gather(-1, second[:, None]) * 2


def of_one_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target)


def integers(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(high))


def normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


CALLS: dict[Callable[..., Tensor], Callable[[int, int], list[Tensor]]] = {
    capped: lambda rows, columns: [normal(rows, columns) * 20, integers(columns, rows)],
    weighted: lambda rows, columns: [
        normal(rows, columns),
        integers(columns, rows),
        normal(columns).abs(),
    ],
    on_the_diagonal: lambda rows, columns: [normal(columns, columns)],
    of_sequences: lambda rows, columns: [
        normal(2, rows + 1, columns),
        integers(columns, 2, rows + 1),
        integers(2, 2, rows + 1).bool(),
    ],
    two_of_a_row: lambda rows, columns: [
        normal(columns, rows).t(),
        integers(columns, rows),
        integers(columns, rows).flip(0),
    ],
    of_one_row: lambda rows, columns: [normal(columns), integers(columns)],
}


@pytest.mark.parametrize("function", CALLS, ids=lambda one: one.__name__)
def test_a_picked_column_takes_no_sweep(tmp_path: Path, function: Callable[..., Tensor]) -> None:
    """Short rows, and such as several programs share; one sweep finds the largest element of a row
    and the sum of exponentials."""
    folder = tmp_path / function.__name__
    fuselab.eject(function, *CALLS[function](6, 40), out=folder)
    text = (folder / "triton_kernels.py").read_text()
    assert "picked_logits" in text and "SWEEP == 2" not in text.split("_backward(")[0]
    for rows, columns in ((6, 40), (2, 3001)):
        args = CALLS[function](rows, 101 if function is on_the_diagonal else columns)
        compare_interpreted(folder, args)
        compare_cpp(folder, args)


def test_a_column_outside_of_the_row_counts_nothing(tmp_path: Path) -> None:
    """PyTorch refuses such a target; a kernel reads nothing there."""
    folder = tmp_path / "capped"
    fuselab.eject(capped, *CALLS[capped](6, 40), out=folder)
    op = load_op(str(folder))
    logits, _ = CALLS[capped](6, 40)
    outside = torch.tensor([40, -1, 10**9, 3, 0, 39])
    loss = interpreter.run(f"{folder}/op.py:forward_triton", logits, outside)
    found = op.without_residuals(loss)
    assert found[:3].tolist() == [0, 0, 0]
    torch.testing.assert_close(found[3:], capped(logits[3:], outside[3:]))


def weight_of_class(index: Tensor, weight: Tensor, like: Tensor) -> Tensor:
    """Sum up a row in which all elements are 0 but one, whose value is the row's."""
    is_it = torch.arange(like.shape[1], device=like.device) == index[:, None]
    return torch.where(is_it, weight[:, None].tanh(), 0.0).sum(1) * like[:, 0]


def test_the_gradient_of_cross_entropy_takes_no_sweep(tmp_path: Path) -> None:
    """The sum of the loss's gradient over a row is the number at the target."""
    folder = tmp_path / "of_rows"
    fuselab.eject(F.cross_entropy, *CALLS[weighted](64, 512)[:2], out=folder, name="of_rows")
    backward = (folder / "triton_kernels.py").read_text().split("@triton.jit")[-1]
    assert "tile(" in backward and "for block" not in backward and "tl.sum" not in backward
    for rows, columns in ((6, 40), (2, 3001), (1, 1)):
        args = CALLS[weighted](rows, max(columns, 3))[:2]
        compare_interpreted(folder, args)
        compare_cpp(folder, args)


def test_a_value_of_the_row_counts_where_its_place_is_inside(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    args = [integers(7, 5), normal(5), normal(5, 7)]
    fuselab.eject(weight_of_class, *args, out=folder, name="weights")
    assert "for block" not in (folder / "triton_kernels.py").read_text().split("@triton.jit")[1]
    compare_interpreted(folder, args)
    compare_cpp(folder, args)
    outside = torch.tensor([7, -1, 10**9, 3, 0])
    found = interpreter.run(f"{folder}/op.py:forward_triton", outside, *args[1:])
    found = load_op(str(folder)).without_residuals(found)
    assert found[:3].tolist() == [0, 0, 0]
    torch.testing.assert_close(found[3:], (args[1].tanh() * args[2][:, 0])[3:])
