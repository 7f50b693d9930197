"""Map ids to indices below a cardinality, all columns in one launch."""

from fuselab.ops.hash_indices.op import OP
from fuselab.runtime.dispatch import operator

hash_indices = operator(OP)

__all__ = ["OP", "hash_indices"]
