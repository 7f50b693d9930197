"""Criteo's layout: read it as it is, make more of it.

``read`` yields rows as the file has them, ``batches`` yields tensors, ``synthesize`` writes more.
"""

from fuselab.data.batches import Batch, batches, log_counts, to_batch
from fuselab.data.description import Description, describe
from fuselab.data.layout import KAGGLE_CARDINALITIES, MISSING_COUNT, MISSING_ID, Rows
from fuselab.data.synthetic import pieces, synthesize
from fuselab.data.tsv import TruncatedLineWarning, read

__all__ = [
    "KAGGLE_CARDINALITIES",
    "MISSING_COUNT",
    "MISSING_ID",
    "Batch",
    "Description",
    "Rows",
    "TruncatedLineWarning",
    "batches",
    "describe",
    "log_counts",
    "pieces",
    "read",
    "synthesize",
    "to_batch",
]
