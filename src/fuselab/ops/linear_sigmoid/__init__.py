"""sigmoid(input Wᵀ + b) of a linear layer with one output, in one pass over the input."""

from fuselab.ops.linear_sigmoid.op import OP
from fuselab.runtime.dispatch import operator

linear_sigmoid = operator(OP)

__all__ = ["OP", "linear_sigmoid"]
