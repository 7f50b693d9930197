"""The Triton kernels of the GIoU losses on the CPU, under Triton's interpreter in a child process;
bfloat16 is left to the GPU: the interpreter's stores truncate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from giou_cases import (
    COUNTS,
    REDUCTIONS,
    assert_right,
    by_hand,
    layouts,
    padded_batch,
    pairs,
    special_pairs,
    tying_pairs,
)

from fuselab.ops.generalized_box_iou_loss import cpu_launch
from fuselab.runtime import interpreter

MODULE = "fuselab.ops.generalized_box_iou_loss.triton_launch"
launcher = SimpleNamespace(
    forward=lambda *args: interpreter.run(f"{MODULE}:forward", *args),
    backward=lambda *args: interpreter.run(f"{MODULE}:backward", *args),
)
reductions = pytest.mark.parametrize("reduction", REDUCTIONS)


def test_values_worked_out_by_hand():
    first, second, expected = by_hand(torch.float32)
    ours = launcher.forward(first, second, "none", 1e-7)
    torch.testing.assert_close(ours.double(), expected, rtol=0, atol=4e-7)


@reductions
def test_counts(reduction):
    for count in COUNTS[:6]:
        assert_right(launcher, *pairs(count, seed=count), reduction)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=lambda dtype: str(dtype)[6:])
@reductions
def test_dtypes_ties_and_special_values(dtype, reduction):
    for types in ((dtype, torch.float32), (torch.float32, dtype)):
        assert_right(launcher, *pairs(3, 21, dtypes=types), reduction)
    assert_right(launcher, *tying_pairs(100, dtype), reduction)
    assert_right(launcher, *special_pairs(dtype), reduction)
    assert_right(launcher, *padded_batch(5, 21, dtypes=(dtype, dtype)), reduction)


@pytest.mark.parametrize("layout", layouts())
def test_layouts(layout):
    assert_right(launcher, *layouts()[layout])


def test_padding_is_found_in_any_layout():
    for first, second in (layouts()[name] for name in ("coordinates_first", "four_loops, second")):
        assert_right(launcher, first, second, "padded")


def test_the_loss_is_that_of_the_cpp_kernel_to_the_bit():
    """Both round as eager does: no FMA, IEEE division."""
    for first, second in (pairs(300), tying_pairs(300, torch.float32)):
        ours, theirs = (run.forward(first, second, "none", 1e-7) for run in (launcher, cpu_launch))
        assert torch.equal(ours, theirs)


def test_upstream_gradients_of_any_stride():
    first, second = pairs(9, 14)
    for grad in (
        torch.randn(14, 9).t(),
        torch.randn(9, 28)[:, ::2],
        torch.randn(9, 1).expand(9, 14),
        torch.randn(14).expand(9, 14),
    ):
        arguments = (first, second, "none", 1e-7)
        ours = launcher.backward((True, True), grad, *arguments)
        expected = launcher.backward((True, True), grad.contiguous(), *arguments)
        assert torch.equal(ours[0], expected[0]) and torch.equal(ours[1], expected[1])
