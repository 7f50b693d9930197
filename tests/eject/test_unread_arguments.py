"""Arguments of which the backward reads the shape alone: they are not held for it."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from comparing import imported
from torch import Tensor

import fuselab


def weighted_sum(x: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    return (x * 2 + torch.exp(scale) + bias).sum(-1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    args = torch.ones(3, 4, 6), torch.ones(6), torch.ones(4, 6)
    path: Path = fuselab.eject(
        weighted_sum, *args, out=tmp_path_factory.mktemp("unread") / "weighted_sum"
    )
    return path


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


SHAPES = ((3, 4, 6), (6,), (4, 6))


def test_what_is_saved(folder):
    op = (folder / "op.py").read_text()
    assert "return (without_elements(x), scale, without_elements(bias))" in op


@pytest.mark.parametrize("turn", range(3))  # the first calls have no launch plan
def test_an_argument_is_freed_and_may_be_written_over(folder, turn):
    op = imported(folder).weighted_sum
    leaves = drawn(*SHAPES)
    x, scale, bias = (one * 1 for one in leaves)
    output = op(x, scale, bias)
    with torch.no_grad():
        bias.mul_(3)  # eager, too, has not saved it
    held = weakref.ref(x)
    del x
    assert held() is None
    gradients = torch.autograd.grad(output.square().sum(), leaves)
    wanted = torch.autograd.grad(weighted_sum(*leaves).square().sum(), leaves)
    torch.testing.assert_close(gradients, wanted)


def test_layouts_dtypes_and_second_derivatives(folder):
    op = imported(folder).weighted_sum
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        x, scale, bias = (one.detach().to(dtype) for one in drawn(*SHAPES))
        across = x.transpose(0, 2).contiguous().transpose(0, 2)
        for given in (x, across, x[:0], torch.cat((x, x), 1)[:, ::2]):
            leaves = [one.requires_grad_() for one in (given.detach(), scale, bias)]
            (first,) = torch.autograd.grad(op(*leaves).sum(), leaves[:1])
            (wanted,) = torch.autograd.grad(weighted_sum(*leaves).sum(), leaves[:1])
            torch.testing.assert_close(first, wanted)
            assert first.stride() == torch.empty_like(given).stride()
    wide = [one.detach().double().requires_grad_() for one in drawn(*SHAPES)]
    assert torch.autograd.gradgradcheck(op, wide)


def test_a_compiler_a_transform_and_inference(folder):
    op = imported(folder).weighted_sum
    leaves = drawn(*SHAPES)
    wanted = torch.autograd.grad(weighted_sum(*leaves).sum(), leaves)
    compiled = torch.compile(lambda *args: op(*args).sum(), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), wanted)
    given = [one.detach() for one in leaves]
    found = torch.func.grad(lambda *args: op(*args).sum(), argnums=(0, 1, 2))(*given)
    torch.testing.assert_close(found, wanted)
    with torch.inference_mode():
        torch.testing.assert_close(op(*given), weighted_sum(*given))
