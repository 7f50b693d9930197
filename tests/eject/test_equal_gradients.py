"""The terms of a sum have one gradient, which an ejected backward computes and stores once, or not
at all where it is the upstream gradient."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import fuselab
from fuselab.ejection.eject import ejected
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


def scale_residual(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x + residual
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], weight), hidden


def test_it_is_stored_where_it_is_computed() -> None:
    """Not by the sum for the argument between the two: that joins the kernel of both."""
    made = ejected(
        scale_residual, (torch.randn(4, 96), torch.randn(96), torch.randn(4, 96)), {}, "scale"
    )
    text = made.files["triton_kernels.py"]
    assert re.findall(r"def (scale\w*)\(", text) == [
        "scale",
        "scale_backward",
        "scale_backward_sums",
    ]


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


def kept_branch(x: Tensor, branch: Tensor, keep: Tensor) -> Tensor:
    return x + branch * keep[:, None] / 0.9


@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_upstream_gradients_are_passed_on(
    tmp_path: Path, dtype: torch.dtype, is_planned: bool
) -> None:
    """No kernel copies the gradient of ``x``; where it has another dtype, PyTorch converts it."""
    if is_planned and not autograd_node.start():
        pytest.skip("autograd's node cannot be built here")
    keep = torch.tensor([True, False, True, True])
    fuselab.eject(kept_branch, *torch.randn(2, 4, 6), keep, out=tmp_path / "kept_branch")
    declared = load_op(str(tmp_path / "kept_branch"))
    assert declared.gradient is not None and declared.gradient.passed == ((0, 0),)
    op = fuselab.operator(declared)
    x = torch.randn(4, 9, dtype=dtype, requires_grad=True)
    branch, grad = torch.randn(4, 9, requires_grad=True), torch.randn(9, 4).t()
    theirs = torch.autograd.grad(kept_branch(x, branch, keep), (x, branch), grad)
    for _ in range(3 if is_planned else 1):
        ours = torch.autograd.grad(op(x, branch, keep, implementation="cpp"), (x, branch), grad)
        assert (ours[0].data_ptr() == grad.data_ptr()) == (dtype == torch.float32)
        torch.testing.assert_close(ours, theirs)
        assert [one.stride() for one in ours] == [(1, 4), (9, 1)]
    raw = torch.ops.ejected.kept_branch_backward
    own = raw([True, True, False], grad, x.detach(), branch.detach(), keep, "cpp")
    assert own[0].data_ptr() != grad.data_ptr() and torch.equal(own[0], theirs[0])
