"""DLRM in plain PyTorch: a bottom MLP, one embedding per category, an interaction, a top MLP.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(arXiv:1906.00091). Written in the usual way of a PyTorch user, so that there is something to
optimise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.data.batches import batches, to_batch
from fuselab.data.layout import DENSE_COLUMNS, KAGGLE_CARDINALITIES, SPARSE_COLUMNS
from fuselab.data.records import Batch
from fuselab.data.synthetic import pieces
from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.ops.vocabulary_indices.reference import Vocabulary, vocabulary_indices

INTERACTIONS = ("outer", "dot", "cat")
IDS = ("modulus", "vocabulary")


@dataclass(frozen=True)
class DlrmConfig:
    """Widths of the layers.

    ``dense_hidden`` leads from 13 counts to ``embedding_dim``; ``prediction_hidden`` from the
    interaction to one logit. Column c has ``min(cardinalities[c], largest_table)`` embeddings.
    ``ids`` says how a raw id becomes a row of its table: by ``modulus``, or by a ``vocabulary``
    whose unknown ids share the last row.
    """

    dense_hidden: tuple[int, ...] = (32,)
    embedding_dim: int = 16
    prediction_hidden: tuple[int, ...] = (32,)
    interaction: str = "outer"
    cardinalities: tuple[int, ...] = KAGGLE_CARDINALITIES
    largest_table: int = 10_000
    ids: str = "modulus"

    def __post_init__(self) -> None:
        if self.interaction not in INTERACTIONS:
            raise UnknownNameError("interaction", self.interaction, INTERACTIONS)
        if self.ids not in IDS:
            raise UnknownNameError("ids", self.ids, IDS)
        if len(self.cardinalities) != SPARSE_COLUMNS:
            raise ArgumentError(
                f"DlrmConfig.cardinalities has {len(self.cardinalities)} entries; "
                f"it needs one for each of the {SPARSE_COLUMNS} categorical columns."
            )
        if not self.prediction_hidden:
            raise ArgumentError(
                "DlrmConfig.prediction_hidden is empty; it needs one hidden layer at least."
            )
        widths = (*self.dense_hidden, self.embedding_dim, *self.prediction_hidden)
        if min(*widths, *self.cardinalities, self.largest_table) < 1:
            raise ArgumentError("every width, cardinality and table size of a DlrmConfig is >= 1.")

    @property
    def table_sizes(self) -> tuple[int, ...]:
        return tuple(min(size, self.largest_table) for size in self.cardinalities)

    @property
    def interaction_width(self) -> int:
        """The width of the interaction's output: for outer the square of all vectors end to end,
        for dot the pairs and the dense vector, for cat all vectors end to end."""
        vectors = SPARSE_COLUMNS + 1
        if self.interaction == "outer":
            return (vectors * self.embedding_dim) ** 2
        if self.interaction == "dot":
            return vectors * (vectors - 1) // 2 + self.embedding_dim
        return vectors * self.embedding_dim


SMALL = DlrmConfig()
MAIN = DlrmConfig(
    dense_hidden=(512, 256, 64),
    prediction_hidden=(512, 256),
    interaction="dot",
    largest_table=1_000_000,
)


class Dlrm(nn.Module):
    """A DLRM: the probability of a click, [B, 1], from counts [B, 13] and raw ids [B, 26].

    The parameters of ``forward`` are ``dense`` (the counts) and ``sparse`` (the ids).
    ``vocabulary`` is needed if ``config.ids`` is ``"vocabulary"``; table t then has one row per id
    in column t's vocabulary, and one more.
    """

    sorted_keys: Tensor
    slots: Tensor
    offsets: Tensor

    def __init__(
        self,
        config: DlrmConfig = SMALL,
        vocabulary: Vocabulary | None = None,
        new_table: Callable[[int, int], nn.Embedding] | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        if (vocabulary is not None) != (config.ids == "vocabulary"):
            raise ArgumentError(
                f"Dlrm: the configuration's ids are by {config.ids}, and a vocabulary is "
                f"{'missing' if vocabulary is None else 'given'}; make them agree."
            )
        for name, tensor in (vocabulary._asdict() if vocabulary is not None else {}).items():
            self.register_buffer(name, tensor)
        width = config.embedding_dim
        self.dense_mlp = _mlp((DENSE_COLUMNS, *config.dense_hidden, width), last_relu=True)
        table = drawn_table if new_table is None else new_table
        self.embeddings = nn.ModuleList(table(size, width) for size in config.table_sizes)
        self.prediction_mlp = _mlp(
            (config.interaction_width, *config.prediction_hidden, 1), last_relu=False
        )

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return the probability, [B, 1]; train on ``logits`` instead."""
        return torch.sigmoid(self.logits(dense, sparse))

    def logits(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Return the logit, [B, 1], which ``binary_cross_entropy_with_logits`` takes."""
        return self.logits_of_vectors(dense, self.embed(sparse))

    def logits_of_rows(self, dense: Tensor, rows: Tensor) -> Tensor:
        """Return the logit, [B, 1], of ids that are already rows of their tables, as a Loader has
        them."""
        return self.logits_of_vectors(dense, self.embed_rows(rows))

    def logits_of_vectors(self, dense: Tensor, vectors: Sequence[Tensor]) -> Tensor:
        """Return the logit, [B, 1], of the counts and the 26 embeddings: all layers after the
        tables."""
        logits: Tensor = self.prediction_mlp(self.interact([self.dense_mlp(dense), *vectors]))
        return logits

    def rows(self, sparse: Tensor) -> Tensor:
        """Map raw ids [B, 26] to rows of their tables, int64."""
        if self.config.ids == "vocabulary":
            return vocabulary_indices(sparse, self.sorted_keys, self.slots, self.offsets)
        return (sparse + 1) % torch.tensor(self.config.table_sizes, device=sparse.device)

    def embed_rows(self, rows: Tensor) -> list[Tensor]:
        """Look up rows [B, 26]; return 26 vectors [B, D]."""
        return [table(rows[:, column]) for column, table in enumerate(self.embeddings)]

    def embed(self, sparse: Tensor) -> list[Tensor]:
        """Look up raw ids [B, 26]; return 26 vectors [B, D].

        By modulus ids wrap into their table, ``(id + 1) % size``, so a missing id (-1) becomes 0.
        """
        if self.config.ids == "vocabulary":
            return self.embed_rows(self.rows(sparse))
        return [
            table((sparse[:, column] + 1) % size)
            for column, (table, size) in enumerate(
                zip(self.embeddings, self.config.table_sizes, strict=True)
            )
        ]

    def interact(self, vectors: Sequence[Tensor]) -> Tensor:
        """Return the interaction, [B, ``interaction_width``], of the dense vector and the 26
        embeddings.

        They are passed in that order. ``dot`` gives the dense vector, then the dot products below
        the diagonal, row by row.
        """
        if self.config.interaction == "cat":
            return torch.cat(list(vectors), dim=1)
        if self.config.interaction == "outer":
            row = torch.cat(list(vectors), dim=1)
            return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)
        stacked = torch.stack(list(vectors), dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        lower = torch.tril_indices(len(vectors), len(vectors), offset=-1, device=products.device)
        return torch.cat([vectors[0], products[:, lower[0], lower[1]]], dim=1)


def _mlp(widths: Sequence[int], last_relu: bool) -> nn.Sequential:
    """Return linear layers with a ReLU after each, after the last one only if asked."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))


def drawn_table(size: int, width: int) -> nn.Embedding:
    """Return a table drawn uniformly in +-1/sqrt(size), as in the original."""
    table = nn.Embedding(size, width)
    nn.init.uniform_(table.weight, -(size**-0.5), size**-0.5)
    return table


# --- what makes it a TARGET ----------------------------------------------------------------------

BATCH = 64  # the published small configuration's


def example_batch(data: str | None = None, batch: int = BATCH) -> Batch:
    """Return the first ``batch`` rows of the file ``data``, or all if fewer; synthetic ones if
    None."""
    if data is not None:
        return next(batches(data, batch))
    return to_batch(next(pieces(batch)))


def get_inputs(data: str | None = None, batch: int = BATCH) -> list[Tensor]:
    """Return ``dense`` and ``sparse`` of ``example_batch``."""
    rows = example_batch(data, batch)
    return [rows.dense, rows.sparse]


def get_init_inputs() -> list[Any]:
    """Return the small published configuration."""
    return [SMALL]
