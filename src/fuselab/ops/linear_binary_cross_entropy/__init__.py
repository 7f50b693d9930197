"""binary_cross_entropy_with_logits(input Wᵀ + b, target) of a linear layer with one output."""

from fuselab.ops.linear_binary_cross_entropy.op import OP
from fuselab.runtime.dispatch import operator

linear_binary_cross_entropy = operator(OP)

__all__ = ["OP", "linear_binary_cross_entropy"]
