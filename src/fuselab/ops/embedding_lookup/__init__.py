"""Look up embeddings of many tables in one launch, also with the optimizer in the backward."""

from fuselab.ops.embedding_lookup.op import OP
from fuselab.ops.embedding_lookup.updating import updating_embedding_lookup
from fuselab.runtime.dispatch import operator

embedding_lookup = operator(OP)

__all__ = ["OP", "embedding_lookup", "updating_embedding_lookup"]
