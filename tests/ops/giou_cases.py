"""Boxes on which GIoU kernels have gone wrong, and the bar that every implementation is held to."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.generalized_box_iou_loss import reference as plain
from fuselab.ops.generalized_box_iou_loss.cases import LAYOUTS, grid_boxes, random_boxes
from fuselab.ops.padded_generalized_box_iou_loss import reference as padded
from fuselab.prove.accuracy import Bar

REDUCTIONS = ("none", "mean", "sum", "padded")
EPS = 1e-7
# Both sides of a Triton program's pairs, of a CPU tile and of a CUDA block, and two of them.
COUNTS = (1, 2, 3, 255, 256, 257, 511, 513)

# Pairs of boxes and 1 - GIoU, worked out by hand with eps = 0: intersection I, union U, hull C.
BY_HAND: tuple[tuple[Sequence[float], Sequence[float], float], ...] = (
    ((0, 0, 1, 1), (2, 2, 3, 3), 1 - (0 - (9 - 2) / 9)),  # apart: I 0, U 2, C 9
    ((0, 0, 2, 2), (1, 1, 3, 3), 1 - (1 / 7 - (9 - 7) / 9)),  # I 1, U 7, C 9
    ((0, 0, 4, 4), (1, 1, 2, 2), 1 - 1 / 16),  # one inside the other: C = U
    ((0, 0, 2, 1), (0, 0, 2, 1), 0.0),  # equal
    ((0, 0, 1, 1), (1, 0, 2, 1), 1.0),  # side by side: C = U, I 0
    ((0, 0, 1, 3), (2, 0, 3, 3), 1 - (0 - (9 - 6) / 9)),  # apart along x alone
    ((0, 0, 2, 2), (1, 1, 1, 1), 1.0),  # a point inside
)


def by_hand(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Both boxes of ``BY_HAND`` and the losses in float64."""
    first, second, loss = zip(*BY_HAND, strict=True)
    return (
        torch.tensor(first, dtype=dtype),
        torch.tensor(second, dtype=dtype),
        torch.tensor(loss, dtype=torch.float64),
    )


def pairs(
    *shape: int, seed: int = 0, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32,) * 2
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    first, second = (random_boxes(shape, generator).to(dtype) for dtype in dtypes)
    return first, second


def tying_pairs(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return tuple(grid_boxes((count,), generator).to(dtype) for _ in range(2))


def special_pairs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """NaN, infinity, -0.0, the largest number and sides below 0, each in its own pairs."""
    first, second = pairs(64, dtypes=(dtype, dtype))
    values = (math.nan, math.inf, -math.inf, -0.0, torch.finfo(dtype).max, -1.0)
    for place, value in enumerate(values):
        for coordinate in range(4):
            first[4 * place + coordinate, coordinate] = value
            second[4 * place + 32 + coordinate, coordinate] = value
    return first, second


def padded_batch(
    *shape: int, seed: int = 0, dtypes: tuple[torch.dtype, torch.dtype] = (torch.float32,) * 2
) -> tuple[Tensor, Tensor]:
    """Every third row of the target is padding, of which every other holds NaN and infinity; their
    bottoms are 0, -0.0, below 0 and NaN."""
    pred, target = pairs(*shape, seed=seed, dtypes=dtypes)
    rows, of_pred = target.view(-1, 4), pred.view(-1, 4)
    for row in range(1, len(rows), 3):
        bottom = (0.0, -0.0, -1.0, math.nan)[row % 4]
        rows[row] = torch.tensor([math.nan, math.inf, 1.0, bottom] if row % 2 else [0.0] * 4)
        of_pred[row] = math.nan if row % 2 else 0.5
    return pred, target


def layouts() -> dict[str, tuple[Tensor, Tensor]]:
    """The contract's layouts of both boxes, one of each by itself, and two that differ."""
    found = {}
    for name, (shape, lay_out) in LAYOUTS.items():
        first, second = pairs(*shape, seed=3)
        first, second = lay_out(first), lay_out(second)
        found[name] = first, second
        found[f"{name}, first"] = first, second.contiguous()
        found[f"{name}, second"] = first.contiguous(), second
    first, second = pairs(8, 12, seed=4)
    found["one row of each"] = first[:1].expand(8, 12, 4), second[:, :1].expand(8, 12, 4)
    return found


def reference(reduction: str, eps: float) -> Callable[[Tensor, Tensor], Tensor]:
    if reduction == "padded":
        return padded.padded_generalized_box_iou_loss
    return lambda first, second: plain.generalized_box_iou_loss(first, second, reduction, eps)


def assert_right(
    launcher: Any,
    first: Tensor,
    second: Tensor,
    reduction: str = "none",
    eps: float = EPS,
    alone: bool = True,
) -> None:
    """Loss and gradients of ``launcher`` within the bar of ``fuselab check`` (4 times eager's error
    plus 2 ulp per row, NaN and infinities where eager has them), for an upstream gradient of its
    own per pair and for one number with strides of 0; ``alone`` each gradient by itself too, which
    has kernels of its own."""
    function = reference(reduction, eps)

    def evaluate(values: Sequence[Any]) -> list[Tensor | None]:
        *boxes, grad = values
        leaves = [tensor.detach().requires_grad_() for tensor in boxes]
        output = function(*leaves)
        return [output.detach(), *torch.autograd.grad(output, leaves, grad.to(output.dtype))]

    loss = launcher.forward(first, second, reduction, eps)
    generator = torch.Generator().manual_seed(9)
    upstream = torch.randn(loss.shape, generator=generator).to(loss)
    for grad in (upstream, upstream.new_full((), -1.5).expand(loss.shape)):
        bar = Bar(evaluate, [first, second, grad], ["loss", "gradient 1", "gradient 2"])
        grads = launcher.backward((True, True), grad, first, second, reduction, eps)
        for name, judgement in zip(bar.names, bar.judge([loss, *grads]), strict=True):
            assert judgement.problem is None, f"{reduction}: {name} {judgement.problem}"
        for needs in ((True, False), (False, True)) if alone else ():
            alone = launcher.backward(needs, grad, first, second, reduction, eps)
            for need, one, both in zip(needs, alone, grads, strict=True):
                assert (one is None) != need
                assert not need or same(one, both)


def same(first: Tensor, second: Tensor) -> bool:
    """Equal, NaN where NaN is."""
    return bool(((first == second) | (first.isnan() & second.isnan())).all())
