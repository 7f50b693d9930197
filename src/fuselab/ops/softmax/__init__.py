"""Softmax and log_softmax over one dimension: each element is read once and written once, and its
exp is computed once."""

from fuselab.ops.softmax.op import IN_PLACE, LOG_SOFTMAX, LOG_SOFTMAX_IN_PLACE, OP
from fuselab.runtime.dispatch import operator

softmax = operator(OP)
softmax_ = operator(IN_PLACE)
log_softmax = operator(LOG_SOFTMAX)
log_softmax_ = operator(LOG_SOFTMAX_IN_PLACE)

__all__ = ["IN_PLACE", "LOG_SOFTMAX", "LOG_SOFTMAX_IN_PLACE", "OP"]
__all__ += ["log_softmax", "log_softmax_", "softmax", "softmax_"]
