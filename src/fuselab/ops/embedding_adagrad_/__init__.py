"""A step of row-wise Adagrad on the rows of embedding tables that ids point to, in place."""

from fuselab.ops.embedding_adagrad_.op import OP
from fuselab.runtime.dispatch import operator

embedding_adagrad_ = operator(OP)

__all__ = ["OP", "embedding_adagrad_"]
