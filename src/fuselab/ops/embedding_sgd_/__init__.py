"""A step of SGD on the rows of embedding tables that ids point to, in place."""

from fuselab.ops.embedding_sgd_.op import OP
from fuselab.runtime.dispatch import operator

embedding_sgd_ = operator(OP)

__all__ = ["OP", "embedding_sgd_"]
