"""act(input + scale * update + bias), fused: one read of every operand, one write of the output."""
from fuselab.ops.add_mul_activation.op import OP
from fuselab.runtime.dispatch import operator
add_mul_activation = operator(OP)
