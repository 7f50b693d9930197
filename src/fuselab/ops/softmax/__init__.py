"""Softmax over one dimension: each element is read once, its exp computed once, written once."""

from fuselab.ops.softmax.op import IN_PLACE, OP
from fuselab.runtime.dispatch import operator

softmax = operator(OP)
softmax_ = operator(IN_PLACE)

__all__ = ["IN_PLACE", "OP", "softmax", "softmax_"]
