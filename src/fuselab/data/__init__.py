"""Criteo's layout: read it as it is, synthesize more rows, prepare them, and load batches of them.

``open_dataset`` opens rows to train on and ``Loader`` gives their batches; ``read`` yields rows as
a file has them, ``batches`` yields them as tensors, ``synthesize`` writes more.
"""

from fuselab.data.batches import batches, read, to_batch
from fuselab.data.dataset import Dataset, open_dataset
from fuselab.data.dense import Dense, log_counts
from fuselab.data.description import Description, describe
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import KAGGLE_CARDINALITIES, MISSING_COUNT, MISSING_ID, Rows
from fuselab.data.loader import Loader, Position
from fuselab.data.records import Batch
from fuselab.data.rejects import TruncatedLineWarning
from fuselab.data.synthetic import pieces, synthesize

__all__ = [
    "KAGGLE_CARDINALITIES",
    "MISSING_COUNT",
    "MISSING_ID",
    "Batch",
    "Dataset",
    "Dense",
    "Description",
    "Loader",
    "Modulus",
    "Position",
    "Rows",
    "TruncatedLineWarning",
    "Vocabulary",
    "batches",
    "describe",
    "log_counts",
    "open_dataset",
    "pieces",
    "read",
    "synthesize",
    "to_batch",
]
