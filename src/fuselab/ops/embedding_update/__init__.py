"""One optimizer step on the rows of embedding tables that ids select, in place."""

from fuselab.ops.embedding_update.op import ADAGRAD, SGD
from fuselab.runtime.dispatch import operator

embedding_sgd_ = operator(SGD)
embedding_adagrad_ = operator(ADAGRAD)

__all__ = ["ADAGRAD", "SGD", "embedding_adagrad_", "embedding_sgd_"]
