"""act(input + bias) in one pass over memory: the epilogue of a linear layer."""

from fuselab.ops.bias_activation.op import OP
from fuselab.runtime.dispatch import operator

bias_activation = operator(OP)

__all__ = ["OP", "bias_activation"]
