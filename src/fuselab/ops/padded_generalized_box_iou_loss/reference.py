"""The generalized IoU loss of a padded batch in plain PyTorch: the definition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.generalized_box_iou_loss.reference import pair_gradients, pair_losses

EPS = 1e-7  # torchvision's default


def padded_generalized_box_iou_loss(pred: Tensor, target: Tensor) -> Tensor:
    """Compute the mean of 1 - GIoU over the rows that are boxes, not padding.

    Padding is a row of ``target`` whose bottom (the last coordinate) is not above 0. The values in
    such a row, and in the same row of ``pred``, do not matter, even if they are NaN.

    Args:
        pred: (B, N, 4), or any (..., 4): boxes as (x1, y1, x2, y2); float32, float16, bfloat16 or
            float64, any strides.
        target: of the same shape; its dtype may differ, and neither is cast in memory.

    Returns:
        A 0-d tensor, float64 if one of the boxes is, else float32; 0 if no row is a box. The GIoU
        is that of ``generalized_box_iou_loss`` with its default eps; arithmetic is in the result's
        dtype.

    Differentiable twice in both; padding gets a gradient of 0. Nothing synchronises: the number of
    boxes stays on the device.

    Raises:
        ShapeError, DtypeError, UnknownNameError (implementation), DeviceError, UnsupportedError (an
        implementation asked for by name that cannot run here).
    """
    valid, pred, target = _without_padding(pred, target)
    loss = torch.where(valid, pair_losses(pred, target, EPS), 0.0)
    return loss.sum() / valid.sum().clamp(min=1)


def padded_generalized_box_iou_loss_backward(
    needs: Sequence[bool], grad_output: Tensor, pred: Tensor, target: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of both, contiguous, each in its own dtype."""
    valid, pred, target = _without_padding(pred, target)
    grad = torch.where(valid, grad_output / valid.sum().clamp(min=1), 0.0)
    return pair_gradients(needs, grad, pred, target, EPS)


def _without_padding(pred: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return a mask of the rows that are boxes, and both tensors with zeros in the other rows,
    whose gradients are then 0 whatever their values were."""
    valid = target[..., 3] > 0
    keep = valid.unsqueeze(-1)
    return valid, torch.where(keep, pred, 0.0), torch.where(keep, target, 0.0)


def masked(pred: Tensor, target: Tensor) -> Tensor:
    """Compute the loss as model code spells it: a boolean mask picks rows, which synchronises."""
    valid = target[..., 3] > 0
    losses = pair_losses(pred[valid], target[valid], EPS)
    return losses.sum() / max(len(losses), 1)
