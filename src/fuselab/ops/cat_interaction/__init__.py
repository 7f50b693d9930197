"""The concatenation of a sample's vectors: the dense vector, then the embeddings."""

from fuselab.ops.cat_interaction.op import OP
from fuselab.runtime.dispatch import operator

cat_interaction = operator(OP)

__all__ = ["OP", "cat_interaction"]
