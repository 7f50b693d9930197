"""Tensors that a function makes of numbers (identities, ramps, windows), products that read no
element twice, and rarer functions that are made of simpler ones.

Each is ejected as one operator, and its kernels run against autograd in float64: C++, Triton
interpreted, and CUDA C++ compiled for the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import compare, compare_cpp, compare_interpreted, imported
from cuda_on_cpu import Emulator
from torch import Tensor, nn

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op

SHAPES = ((4, 4), (7, 7), (1, 1))
OF_ONE_WIDTH = ((4, 4), (9, 4), (1, 4))  # PyTorch's tracer fixes the length of a ramp or window


def without_itself(x: Tensor, scale: Tensor) -> Tensor:
    others = torch.ones_like(x) - torch.eye(x.shape[0])
    return (x.exp() * others).sum(-1) * scale


def ramps(x: Tensor, scale: Tensor) -> Tensor:
    steps = torch.linspace(-1, 2, x.shape[1])
    return x * steps + scale * torch.logspace(0, 1, x.shape[1]).sqrt() + torch.linspace(3, 3, 1)


def windows(x: Tensor, scale: Tensor) -> Tensor:
    width = x.shape[1]
    long = torch.hann_window(width) + torch.hamming_window(width, periodic=False)
    return x * long * scale + torch.blackman_window(width) * torch.bartlett_window(width)


def windows_of_numbers(x: Tensor, scale: Tensor) -> Tensor:
    own = torch.hamming_window(5, True, 0.6, 0.4) + torch.bartlett_window(5, periodic=False)
    return x.sum() * own + scale.sum() * torch.hann_window(1)


def products_of_rows(x: Tensor, scale: Tensor) -> Tensor:
    rows = torch.einsum("ij,ij->i", x, x.sin())
    return rows * torch.einsum("ij,i->j", x, scale) + torch.dot(scale, scale)


def outer_products(x: Tensor, scale: Tensor) -> Tensor:
    return torch.einsum("i,j->ij", scale, scale) * x + torch.outer(scale, x[0]).sigmoid()


def bounded_rows(x: Tensor, scale: Tensor) -> Tensor:
    return torch.renorm(x * 3, 2, 0, 1.5) * scale


def rarer(x: Tensor, scale: Tensor) -> Tensor:
    return torch.angle(x) * scale + torch.mvlgamma(x.abs() + 2.0, 2)


def few_numbers(x: Tensor, scale: Tensor) -> Tensor:
    weights, levels = torch.tensor([0.5, -1.0, 2.0, 0.25]), torch.tensor([2, 3, -4, 5])
    chosen = levels[(x > 0).sum(-1) % 4]
    return x * weights + scale * torch.tensor([[1.5]]) + chosen[:, None]


FUNCTIONS = (
    without_itself, ramps, windows, windows_of_numbers, products_of_rows, outer_products,
    bounded_rows, rarer, few_numbers,
)  # fmt: skip


def drawn(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    x = torch.linspace(-2, 2.5, rows * columns).sin().reshape(rows, columns) + 0.01
    return x, torch.linspace(0.5, 2, columns)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_kernels(function: Callable[..., Tensor], tmp_path: Path) -> None:
    rows = 5 if function is few_numbers else 4  # not as many as columns, whose number is fixed
    folder = eject(function, *drawn(rows, 4), out=tmp_path / function.__name__)
    assert not (folder / "composed.py").exists()
    shapes = OF_ONE_WIDTH if function in (ramps, windows, few_numbers) else SHAPES
    for shape in shapes:
        compare_cpp(folder, drawn(*shape))
    compare_interpreted(folder, drawn(*shapes[1]))


def test_emulated_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    args = drawn(4, 4)
    ops = [load_op(str(eject(one, *drawn(4, 4), out=tmp_path / one.__name__))) for one in FUNCTIONS]
    with emulator.collecting():
        for op in ops:
            output = op.implementations["cuda"].forward(*args)
            assert op.gradient is not None and op.implementations["cuda"].backward is not None
            upstream = torch.ones_like(op.without_residuals(output))
            saved = op.gradient.save(output, *args)
            op.implementations["cuda"].backward((True, True), upstream, *saved)
    for op in ops:
        cuda = op.implementations["cuda"]
        assert cuda.backward is not None
        compare(op, cuda.forward, cuda.backward, args)


def mixed_channels(x: Tensor, scale: Tensor) -> Tensor:
    matrix = torch.tensor([[0.3, 0.6, 0.1], [-0.2, -0.3, 0.5], [0.5, -0.4, -0.1]])
    return (x[:, None] * matrix).sum(-1) * scale


def test_a_matrix_of_numbers_stays_a_call(tmp_path: Path) -> None:
    """A kernel would compare two positions for each of its elements."""
    folder = eject(mixed_channels, *drawn(5, 3), out=tmp_path / "mixed_channels")
    assert "matrix = torch.tensor([[" in (folder / "composed.py").read_text()
    args = drawn(7, 3)
    found = imported(folder).mixed_channels(*args)
    torch.testing.assert_close(found, mixed_channels(*args))


class Scored(nn.Module):
    """Products of rows between layers, and a product that a library computes."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(6, 6)

    def forward(self, x: Tensor, keys: Tensor) -> Tensor:
        query = self.query(x)
        scores = torch.einsum("nd,nd->n", query, keys).sigmoid()
        return torch.einsum("nd,md->nm", query * scores[:, None], keys.tanh())


def test_an_einsum_of_rows_joins_a_chain(tmp_path: Path) -> None:
    args = torch.ones(5, 6), torch.ones(5, 6)
    folder = eject(Scored(), *args, out=tmp_path / "scored", name="scored")
    page = (folder / "page.md").read_text()
    assert page.count("| einsum |") == 1 and page.count("a library computes it") == 2
    (part,) = (one for one in folder.iterdir() if one.is_dir() and (one / "op.py").exists())
    assert "einsum" in (part / "reference.py").read_text()
