"""A frozen linear layer with a low-rank adapter: act(input Wᵀ + bias + scale (input Aᵀ) Bᵀ)."""

from fuselab.ops.lora_linear.op import OP
from fuselab.runtime.dispatch import operator

lora_linear = operator(OP)

__all__ = ["OP", "lora_linear"]
