"""act(input + bias) in one pass over memory: the epilogue of a linear layer."""

from fuselab.ops.bias_activation.op import IN_PLACE, OP
from fuselab.runtime.dispatch import operator

bias_activation = operator(OP)
bias_activation_ = operator(IN_PLACE)

__all__ = ["IN_PLACE", "OP", "bias_activation", "bias_activation_"]
