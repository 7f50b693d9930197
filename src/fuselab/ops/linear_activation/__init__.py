"""A linear layer and its activation in one kernel: act(input Wᵀ + b)."""

from fuselab.ops.linear_activation.op import OP
from fuselab.runtime.dispatch import operator

linear_activation = operator(OP)

__all__ = ["OP", "linear_activation"]
