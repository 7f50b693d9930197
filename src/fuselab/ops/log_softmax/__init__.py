"""log_softmax over one dimension, by softmax's kernels: each element is read and written once."""

from fuselab.ops.log_softmax.op import IN_PLACE, OP
from fuselab.runtime.dispatch import operator

log_softmax = operator(OP)
log_softmax_ = operator(IN_PLACE)

__all__ = ["IN_PLACE", "OP", "log_softmax", "log_softmax_"]
