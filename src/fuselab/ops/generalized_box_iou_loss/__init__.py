"""The generalized IoU loss of pairs of boxes in one pass over them, with torchvision's values."""

from fuselab.ops.generalized_box_iou_loss.op import OP
from fuselab.runtime.dispatch import operator

generalized_box_iou_loss = operator(OP)

__all__ = ["OP", "generalized_box_iou_loss"]
