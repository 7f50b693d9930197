"""Dot products of all pairs of a sample's vectors, after the dense vector, in one launch."""

from fuselab.ops.dot_interaction.op import OP
from fuselab.runtime.dispatch import operator

dot_interaction = operator(OP)

__all__ = ["OP", "dot_interaction"]
