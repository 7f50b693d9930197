"""Map ids to indices by a vocabulary, all columns in one launch."""

from fuselab.ops.vocabulary_indices.op import OP
from fuselab.ops.vocabulary_indices.reference import Vocabulary, vocabulary
from fuselab.runtime.dispatch import operator

vocabulary_indices = operator(OP)

__all__ = ["OP", "Vocabulary", "vocabulary", "vocabulary_indices"]
