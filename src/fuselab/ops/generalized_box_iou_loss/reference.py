"""The generalized IoU loss in plain PyTorch: the definition, its gradient, and a common spelling.

Rezatofighi et al., "Generalized Intersection over Union", CVPR 2019 (arXiv:1902.09630), with
torchvision's eps: GIoU = I / (U + eps) - (C - U) / (C + eps), where I is the area of the
intersection, U that of the union and C that of the smallest box around both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fuselab.errors import UnknownNameError

REDUCTIONS = ("none", "mean", "sum")


def generalized_box_iou_loss(
    boxes1: Tensor, boxes2: Tensor, reduction: str = "none", eps: float = 1e-7
) -> Tensor:
    """Compute 1 - GIoU of each pair of boxes, as ``torchvision.ops.generalized_box_iou_loss``.

    Args:
        boxes1: (..., 4), boxes as (x1, y1, x2, y2) with x1 <= x2 and y1 <= y2 (not checked);
            float32, float16, bfloat16 or float64, any strides.
        boxes2: of the same shape; its dtype may be another.
        reduction: ``"none"``; ``"mean"`` (of no boxes: 0) or ``"sum"`` over all pairs.
        eps: added to both denominators, so that two empty boxes in one place have the loss 1.

    Returns:
        A contiguous tensor of shape (...), 0-d for "mean" and "sum", in float32, or in float64 if
        one of the boxes is. Arithmetic is in that dtype, so areas of 16-bit boxes do not overflow;
        a pair with a NaN is NaN.

    Differentiable twice in both boxes. If two coordinates tie, each gets half of the gradient of
    their maximum or minimum, as in ``torch.max`` and ``torch.min``. The backward keeps the boxes
    and computes the areas again.

    Raises:
        ShapeError, DtypeError, UnknownNameError (reduction, implementation), DeviceError,
        UnsupportedError (an implementation asked for by name that cannot run here).
    """
    known_reduction(reduction)
    loss = pair_losses(boxes1, boxes2, eps)
    if reduction == "none":
        return loss.contiguous()
    return loss.mean() if reduction == "mean" and loss.numel() else loss.sum()


def generalized_box_iou_loss_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    boxes1: Tensor,
    boxes2: Tensor,
    reduction: str,
    eps: float,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of both boxes, contiguous, each in its boxes' dtype."""
    if reduction == "mean":
        grad_output = grad_output / max(boxes1.shape[:-1].numel(), 1)
    return pair_gradients(needs, grad_output.expand(boxes1.shape[:-1]), boxes1, boxes2, eps)


def known_reduction(reduction: str) -> None:
    """Raise UnknownNameError unless ``reduction`` is one of ``REDUCTIONS``."""
    if reduction not in REDUCTIONS:
        raise UnknownNameError("reduction", reduction, REDUCTIONS)


class _Pairs(NamedTuple):
    """Coordinates and sizes of pairs of boxes, each tensor of shape (...)."""

    first: tuple[Tensor, ...]  # x1, y1, x2, y2
    second: tuple[Tensor, ...]
    overlap: Tensor  # bool: whether the intersection has an area
    width: Tensor  # of the intersection, 0 without overlap; likewise the height
    height: Tensor
    hull_width: Tensor  # of the smallest box around both
    hull_height: Tensor
    intersection: Tensor
    union: Tensor
    hull: Tensor


def _pairs(boxes1: Tensor, boxes2: Tensor) -> _Pairs:
    double = torch.float64 in (boxes1.dtype, boxes2.dtype)
    arithmetic = torch.float64 if double else torch.float32
    first, second = (boxes.to(arithmetic).unbind(-1) for boxes in (boxes1, boxes2))
    x1, y1, x2, y2 = first
    u1, v1, u2, v2 = second
    left, top = torch.maximum(x1, u1), torch.maximum(y1, v1)
    right, bottom = torch.minimum(x2, u2), torch.minimum(y2, v2)
    overlap = (right > left) & (bottom > top)
    # Selected before the product, because 0 * inf in its derivative would be NaN.
    width = torch.where(overlap, right - left, 0.0)
    height = torch.where(overlap, bottom - top, 0.0)
    hull_width = torch.maximum(x2, u2) - torch.minimum(x1, u1)
    hull_height = torch.maximum(y2, v2) - torch.minimum(y1, v1)
    intersection = width * height
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - intersection
    hull = hull_width * hull_height
    return _Pairs(
        first,
        second,
        overlap,
        width,
        height,
        hull_width,
        hull_height,
        intersection,
        union,
        hull,
    )


def pair_losses(boxes1: Tensor, boxes2: Tensor, eps: float) -> Tensor:
    """Return 1 - GIoU of each pair, of shape (...)."""
    pairs = _pairs(boxes1, boxes2)
    iou = pairs.intersection / (pairs.union + eps)
    return 1 - (iou - (pairs.hull - pairs.union) / (pairs.hull + eps))


def pair_gradients(
    needs: Sequence[bool], grad: Tensor, boxes1: Tensor, boxes2: Tensor, eps: float
) -> tuple[Tensor | None, ...]:
    """Return the gradients of ``pair_losses``; ``grad`` has the shape (...)."""
    pairs = _pairs(boxes1, boxes2)
    union, hull = pairs.union + eps, pairs.hull + eps
    by_hull = grad / hull
    grad_hull = by_hull - grad * ((pairs.hull - pairs.union) / hull / hull)
    grad_union = grad * (pairs.intersection / union / union) - by_hull
    grad_intersection = -grad / union - grad_union
    # The gradients of the intersection's width and height, and of the hull's.
    inner_x = torch.where(pairs.overlap, grad_intersection * pairs.height, 0.0)
    inner_y = torch.where(pairs.overlap, grad_intersection * pairs.width, 0.0)
    outer_x, outer_y = grad_hull * pairs.hull_height, grad_hull * pairs.hull_width

    def gradient(mine: tuple[Tensor, ...], other: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        x1, y1, x2, y2 = mine
        u1, v1, u2, v2 = other
        area_x, area_y = grad_union * (y2 - y1), grad_union * (x2 - x1)
        # The intersection's low edge is the larger of two, its high edge the smaller.
        coordinates = (
            -(area_x + _of_edge(inner_x, outer_x, x1, u1)),
            -(area_y + _of_edge(inner_y, outer_y, y1, v1)),
            area_x + _of_edge(outer_x, inner_x, x2, u2),
            area_y + _of_edge(outer_y, inner_y, y2, v2),
        )
        return torch.stack(coordinates, -1).to(dtype)

    return (
        gradient(pairs.first, pairs.second, boxes1.dtype) if needs[0] else None,
        gradient(pairs.second, pairs.first, boxes2.dtype) if needs[1] else None,
    )


def _of_edge(if_larger: Tensor, if_smaller: Tensor, mine: Tensor, other: Tensor) -> Tensor:
    """Return the gradient of the coordinate ``mine``: that of the maximum of two coordinates if it
    is the larger, that of their minimum if it is the smaller, half of both if they tie."""
    alone = torch.where(mine > other, if_larger, if_smaller)
    return torch.where(mine == other, (if_larger + if_smaller) / 2, alone)


def clamped(boxes1: Tensor, boxes2: Tensor, reduction: str = "none", eps: float = 1e-7) -> Tensor:
    """Compute the loss as model code spells it: corners two by two, overlaps clamped at 0."""
    known_reduction(reduction)
    double = torch.float64 in (boxes1.dtype, boxes2.dtype)
    first, second = (
        boxes.to(torch.float64 if double else torch.float32) for boxes in (boxes1, boxes2)
    )

    def area(low: Tensor, high: Tensor, least: float | None = None) -> Tensor:
        sides = high - low if least is None else (high - low).clamp(min=least)
        return sides[..., 0] * sides[..., 1]

    low1, high1, low2, high2 = first[..., :2], first[..., 2:], second[..., :2], second[..., 2:]
    intersection = area(torch.maximum(low1, low2), torch.minimum(high1, high2), 0.0)
    union = area(low1, high1) + area(low2, high2) - intersection
    hull = area(torch.minimum(low1, low2), torch.maximum(high1, high2))
    loss = 1 - intersection / (union + eps) + (hull - union) / (hull + eps)
    if reduction == "none":
        return loss
    return loss.mean() if reduction == "mean" and loss.numel() else loss.sum()
