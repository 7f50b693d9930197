"""act(input + scale * update + bias) in one pass over memory: the epilogue of a LoRA layer, or a
scaled residual."""

from fuselab.ops.add_mul_activation.op import IN_PLACE, OP
from fuselab.runtime.dispatch import operator

add_mul_activation = operator(OP)
add_mul_activation_ = operator(IN_PLACE)

__all__ = ["IN_PLACE", "OP", "add_mul_activation", "add_mul_activation_"]
