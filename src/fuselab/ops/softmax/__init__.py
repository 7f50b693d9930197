"""Softmax over one dimension: each element is read once, its exp computed once, written once."""

from fuselab.ops.softmax.op import OP
from fuselab.runtime.dispatch import operator

softmax = operator(OP)

__all__ = ["OP", "softmax"]
