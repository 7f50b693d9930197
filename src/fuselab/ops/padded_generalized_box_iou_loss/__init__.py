"""The mean generalized IoU loss of a padded batch of boxes in one pass over them."""

from fuselab.ops.padded_generalized_box_iou_loss.op import OP
from fuselab.runtime.dispatch import operator

padded_generalized_box_iou_loss = operator(OP)

__all__ = ["OP", "padded_generalized_box_iou_loss"]
