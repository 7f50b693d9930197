"""The terms of a sum have one gradient, which an ejected backward computes and stores once."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.prove.load import load_op
from fuselab.runtime import autograd_node


def residual_scale(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x + residual
    return hidden, torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("equal") / "residual_scale"
    fuselab.eject(
        residual_scale, torch.randn(4, 96), torch.randn(4, 96), torch.randn(96), out=folder
    )
    return folder


def test_the_package_declares_it(package: Path) -> None:
    op = load_op(str(package))
    assert op.gradient is not None and op.gradient.equal == ((1, 0),)


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients(package: Path, dtype: torch.dtype, is_planned: bool) -> None:
    """In the first call of a kind and, from a plan, in autograd's own node; the second argument's
    dtype decides whether its gradient is that of the first."""
    if is_planned and not autograd_node.start():
        pytest.skip("autograd's node cannot be built here")
    op = fuselab.operator(load_op(str(package)))
    x, weight = torch.randn(7, 33, requires_grad=True), torch.randn(33, requires_grad=True)
    residual = torch.randn(7, 33, dtype=dtype, requires_grad=True)
    grads = torch.randn(7, 33), torch.randn(7, 33)
    args = (x, residual, weight)
    theirs = torch.autograd.grad(residual_scale(*args), args, grads)
    for _ in range(3 if is_planned else 1):
        outputs = op(*args, implementation="cpp")
        ours = torch.autograd.grad(outputs, args, grads)
        assert (ours[0].data_ptr() == ours[1].data_ptr()) == (dtype == torch.float32)
        torch.testing.assert_close(ours, theirs)
        for wanted, expected in zip(args, theirs, strict=True):
            outputs = op(*args, implementation="cpp")
            (one,) = torch.autograd.grad(outputs, wanted, grads)
            torch.testing.assert_close(one, expected)
