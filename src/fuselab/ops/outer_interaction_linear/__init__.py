"""The linear layer behind DLRM's outer product interaction, without ever storing the product."""

from fuselab.ops.outer_interaction_linear.op import OP
from fuselab.runtime.dispatch import operator

outer_interaction_linear = operator(OP)

__all__ = ["OP", "outer_interaction_linear"]
