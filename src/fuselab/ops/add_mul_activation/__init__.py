"""act(input + scale * update + bias) in one pass over memory: the epilogue of a LoRA layer, a
scaled residual."""

from fuselab.ops.add_mul_activation.op import OP
from fuselab.runtime.dispatch import operator

add_mul_activation = operator(OP)

__all__ = ["OP", "add_mul_activation"]
