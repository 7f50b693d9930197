"""Integers of fewer than 64 bits wrap around in kernels as they do in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cuda_on_cpu import Emulator
from torch import Tensor

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def wrapping(a: Tensor, b: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    low = (a & 15).to(torch.int8) - 8
    hashed = (a.to(torch.int32) * 1103515245 + 12345) ^ b
    signed = (a.to(torch.int8) + b).float()
    return (
        (a + b).float() * scale,
        low * scale,
        (hashed >> 8) * scale,
        signed * scale + (-a),
        ((a << 2) / 3 + ~b) * scale,
    )


def test_narrow_integers_wrap_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C++ and CUDA C++ kernels compute with 64 bits; Triton ones left the casts out."""
    a = torch.tensor([[200, 100, 3], [7, 255, 0]], dtype=torch.uint8)
    b = torch.tensor([[100, 101, 250], [4, 1, 128]], dtype=torch.uint8)
    scale = torch.tensor([0.5, 1.0, 3.0])
    folder = eject(wrapping, a, b, scale, out=tmp_path / "wrapping", inference=True)
    op = load_op(str(folder))
    emulator = Emulator(tmp_path)
    emulator.install(monkeypatch)
    with emulator.collecting():
        op.implementations["cuda"].forward(a, b, scale)
    expected = wrapping(a, b, scale)
    assert expected[0][0].tolist() == [22, 201, 759]  # 200 + 100 are 44
    for found in (
        op.implementations["cpp"].forward(a, b, scale),
        op.implementations["cuda"].forward(a, b, scale),
        interpreter.run(f"{folder}/op.py:forward_triton", a, b, scale),
    ):
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs)
    refused = op.implementations["cpp"].supports(a.long(), b, scale)
    assert refused == "argument 1 is int64, and the kernels compute with integers of uint8"
    text = (folder / "triton_kernels.py").read_text("utf-8")
    assert "(a & 15).to(tl.int8) - 8\n" in text  # what cannot overflow is not converted once more


def largest_and_shares(x: Tensor) -> tuple[Tensor, ...]:
    value, place = x.max(-1)
    return value * 2, place, x.softmax(-1)


def least_of_columns(x: Tensor) -> tuple[Tensor, ...]:
    return x.min(0).values.exp(), (x > 0).sum(0) + x.sum(0)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float64), ids=str)
@pytest.mark.parametrize("function", (largest_and_shares, least_of_columns))
def test_positions_that_reductions_find_where_masks_have_64_bits_too(
    function: Callable[[Tensor], tuple[Tensor, ...]], dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = eject(function, torch.ones(5, 9), out=tmp_path / function.__name__)
    op = load_op(str(folder))
    cpp = op.implementations["cpp"]
    for rows, columns in ((5, 9), (1, 1), (33, 70), (3, 500), (500, 3)):
        x = torch.linspace(-9, 9, rows * columns, dtype=dtype).sin().reshape(rows, columns)
        for given in (x, x.t().contiguous().t()):
            leaf = given.clone().requires_grad_()
            expected = function(leaf)
            upstream = [torch.ones_like(result).cumsum(-1) for result in expected]
            real = [place for place, one in enumerate(expected) if one.is_floating_point()]
            (right,) = torch.autograd.grad(
                [expected[place] for place in real], leaf, [upstream[place] for place in real]
            )
            returned = cpp.forward(given)
            found = op.without_residuals(returned)
            torch.testing.assert_close(found, tuple(result.detach() for result in expected))
            (gradient,) = cpp.backward((True,), tuple(upstream), *op.gradient.save(returned, given))
            torch.testing.assert_close(gradient, right)
