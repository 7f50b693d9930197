"""Rolls, and slices that leave out a border: one kernel looks where an element lies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from comparing import compare, compare_cpp, compare_interpreted
from cuda_on_cpu import Emulator
from torch import Tensor

import fuselab
from fuselab.prove.load import load_op


def laplacian(x: Tensor) -> Tensor:
    beside = x.roll(1, -1) + x.roll(-1, -1) + x.roll(2, -2) + x.roll(-1, -2)
    return beside - 4 * x.sin()


def variations(x: Tensor) -> Tensor:
    """Its gradient is a sum of four parts within zeros."""
    across = (x[..., 1:] - x[..., :-1]).square().sum()
    return across + (x[..., 2:, :] * x[..., :-2, :]).exp().sum()


def middle_replaced(x: Tensor, y: Tensor) -> Tensor:
    whole = x * 2
    whole[:, 1:-1] = y
    return whole.tanh() + x


def half_turned(x: Tensor) -> Tensor:
    return x.roll(-(x.shape[-1] // 2), -1).exp() * x.roll((3, -5), (0, -1))


EXAMPLES: dict[Callable[..., Tensor], list[tuple[int, ...]]] = {
    laplacian: [(2, 20, 24)],
    variations: [(2, 20, 24)],
    middle_replaced: [(6, 40), (6, 38)],
    half_turned: [(6, 10)],
}
OTHERS: dict[Callable[..., Tensor], list[list[tuple[int, ...]]]] = {
    laplacian: [[(1, 5, 37)], [(2, 1, 2)], [(3, 2, 1)]],
    variations: [[(1, 5, 37)], [(2, 2, 2)], [(3, 4, 1)]],
    middle_replaced: [[(3, 71), (3, 69)], [(5, 3), (5, 1)]],
    half_turned: [[(9, 74)], [(2, 3)], [(1, 1)]],
}


def drawn(shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))) / 2


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[..., Tensor], Path]:
    found = {}
    for function, shapes in EXAMPLES.items():
        found[function] = tmp_path_factory.mktemp("borders") / function.__name__
        fuselab.eject(function, *map(drawn, shapes), out=found[function])
    return found


@pytest.mark.parametrize("function", EXAMPLES, ids=lambda one: one.__name__)
def test_values_and_gradients(
    folders: dict[Callable[..., Tensor], Path], function: Callable[..., Tensor]
) -> None:
    for shapes in (EXAMPLES[function], *OTHERS[function]):
        args = list(map(drawn, shapes))
        backwards = [one.flip(-1).transpose(0, -1).contiguous().transpose(0, -1) for one in args]
        compare_cpp(folders[function], args)
        compare_cpp(folders[function], backwards)
        compare_interpreted(folders[function], backwards)


def test_emulated_cuda(
    folders: dict[Callable[..., Tensor], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    declared = {function: load_op(str(folder)) for function, folder in folders.items()}
    args = {function: list(map(drawn, shapes)) for function, shapes in EXAMPLES.items()}
    with emulator.collecting():
        for function, op in declared.items():
            cuda = op.implementations["cuda"]
            output = cuda.forward(*args[function])
            needs = [True] * len(args[function])
            saved = op.gradient.save(output, *args[function])
            cuda.backward(needs, torch.ones_like(op.without_residuals(output)), *saved)
    for function, op in declared.items():
        cuda = op.implementations["cuda"]
        compare(op, cuda.forward, cuda.backward, args[function])


@pytest.mark.parametrize(
    ("function", "kernels"),
    [(laplacian, 2), (variations, 3), (middle_replaced, 3), (half_turned, 2)],
)
def test_the_number_of_kernels(
    folders: dict[Callable[..., Tensor], Path], function: Callable[..., Tensor], kernels: int
) -> None:
    text = (folders[function] / "triton_kernels.py").read_text()
    assert text.count("@triton.jit") == kernels
