"""Packages give what eager gives where a normalisation or its mean is of no elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ejected_functions import EXAMPLES

from fuselab.ejection.eject import eject
from fuselab.prove.load import load_op
from fuselab.runtime import interpreter


def of_batch(x, weight, bias):
    return torch.relu(F.batch_norm(x, None, None, weight, bias, training=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    written = tmp_path_factory.mktemp("empty") / "of_batch"
    eject(of_batch, torch.ones(3, 4, 5, 6), torch.ones(4), torch.ones(4), out=written)
    return written


@pytest.mark.parametrize("shape", [(3, 4, 0, 2), (0, 4, 1, 1)])
def test_weights_of_an_empty_batch_have_zero_gradients(
    shape: tuple[int, ...], folder: Path
) -> None:
    args = (torch.ones(shape), torch.ones(4), torch.ones(4))
    upstream = torch.ones(shape)
    gradient = load_op(str(folder)).gradient
    returned = interpreter.run(f"{folder}/op.py:forward_triton", *args)
    given = ((True, True, True), upstream, *gradient.save(returned, *args))
    kernels = interpreter.run(f"{folder}/op.py:backward_triton", *given)
    formulas = gradient.reference(*given)
    for grad_x, *others in (kernels, formulas):
        assert grad_x.shape == shape
        assert [one.tolist() for one in others] == [[0.0] * 4, [0.0] * 4]


def test_the_second_derivative_of_an_empty_batch_is_zero(folder: Path) -> None:
    x, weight, bias, upstream = leaves = [
        torch.ones(shape, requires_grad=True) for shape in ((3, 4, 0, 2), (4,), (4,), (3, 4, 0, 2))
    ]
    op = load_op(str(folder))
    saved = op.gradient.save(
        op.with_residuals(op.reference(x, weight, bias), leaves[:3]), *leaves[:3]
    )
    gradients = op.gradient.reference((True, True, True), upstream, *saved)
    again = torch.autograd.grad(
        sum(one.square().sum() for one in gradients), leaves, allow_unused=True
    )
    assert all(one is None or not one.isnan().any() for one in again)
    assert again[1].tolist() == [0.0] * 4


def centred_rows(x, weight, scale):
    return (x - x.mean(-1, keepdim=True)) * weight * scale


def test_cpp_stores_what_it_sums_over_rows_without_columns(tmp_path: Path) -> None:
    """The sum for the scale is of one part for each row; without columns each part is 0."""
    args = (torch.ones(3, 5), torch.ones(5), torch.ones(3, 1))
    eject(centred_rows, *args, out=tmp_path / "centred")
    backward = load_op(str(tmp_path / "centred")).implementations["cpp"].backward
    empty = (torch.ones(40, 0), torch.ones(0), torch.ones(40, 1))
    dirty = torch.full((40, 1), 7.0)
    del dirty  # the gradient's memory, if it is not written, holds 7
    *_, grad_scale = backward((True, True, True), torch.ones(40, 0), *empty)
    assert grad_scale.tolist() == [[0.0]] * 40


def test_kernels_leave_the_mean_of_an_empty_group_to_the_reference(tmp_path: Path) -> None:
    """Eager's gradient of the weight is NaN there, where a sum of nothing would be 0."""
    function, args = EXAMPLES["group_norm_silu"]
    eject(function, *args, out=tmp_path / "grouped")
    supports = load_op(str(tmp_path / "grouped")).implementations["triton"].supports
    assert supports(*args) is None
    empty = torch.ones(2, 8, 5, 0)
    assert supports(empty, *args[1:]) == "width is 0, which is below 1"


def shifted(x, weight):
    """The time shift of RWKV: each step is mixed with the one before it."""
    before = F.pad(x, (0, 0, 1, -1))
    return torch.sigmoid(x * weight + before * (1 - weight))


def test_padding_around_nothing(tmp_path: Path) -> None:
    """A single step has none before it; a kernel that read the first of these crashed."""
    eject(shifted, torch.ones(2, 6, 8), torch.ones(8), out=tmp_path / "shifted")
    op = load_op(str(tmp_path / "shifted"))
    x = torch.linspace(-2, 2, 12).reshape(3, 1, 4)
    weight = torch.linspace(0, 1, 4)
    for _ in range(2):  # the second call may run a plan
        found = op.implementations["cpp"].forward(x, weight)
        torch.testing.assert_close(found, shifted(x, weight))
    x.requires_grad_()
    saved = op.gradient.save(found, x, weight)
    mine, _ = op.implementations["cpp"].backward((True, False), torch.ones(3, 1, 4), *saved)
    (theirs,) = torch.autograd.grad(shifted(x, weight).sum(), x)
    torch.testing.assert_close(mine, theirs)


def weights_of(scores, scale, shift):
    return torch.softmax(scores * scale + shift, -1)


@pytest.mark.parametrize("shape", [(511, 0), (0, 7), (2, 7)])
def test_what_a_softmax_keeps_of_rows_without_elements(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    """The definition is what fake tensors, and so torch.compile, go through; it agrees with the
    kernel, whose largest element of nothing is -infinity."""
    example = (torch.ones(64, 256), torch.ones(256), torch.ones(256))
    eject(weights_of, *example, out=tmp_path / "weighted")
    op = load_op(str(tmp_path / "weighted"))
    args = (torch.ones(shape), torch.ones(shape[-1]), torch.ones(shape[-1]))
    _, *kept = op.with_residuals(op.reference(*args), args)
    _, *ours = op.implementations["cpp"].forward(*args)
    assert len(kept) == 2
    for one, other in zip(kept, ours, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    if not shape[-1]:
        assert kept[0].tolist() == [[-torch.inf]] * shape[0]
