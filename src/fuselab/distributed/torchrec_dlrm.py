"""A DLRM for TorchRec: its tables are TorchRec's, everything after them fuselab's operators.

It runs as it is, under ``DistributedModelParallel``, and in ``TrainPipelineSparseDist``, which
sends the ids of the next batch while this one trains. Look-up, exchange and update of the tables
are then TorchRec's own (fbgemm).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.data import Batch
from fuselab.distributed.torchrec_tables import features, to_torchrec
from fuselab.models.dlrm import Dlrm
from fuselab.nn.embedding_collection import FusedEmbeddingCollection
from fuselab.nn.interactions import DotInteraction, OuterInteraction
from fuselab.nn.mlp import MLP
from fuselab.ops import cat_interaction, linear_binary_cross_entropy

from torchrec.streamable import Pipelineable  # isort: skip  # torchrec_tables says if it is missing


class TorchrecBatch(Pipelineable):  # type: ignore[misc]
    """A batch whose ids are a ``KeyedJaggedTensor``, as TorchRec's pipelines take it.

    Args:
        dense: counts [B, 13].
        ids: one row of every table for each of B.
        labels: [B], 0 or 1.
    """

    def __init__(self, dense: Tensor, ids: Any, labels: Tensor) -> None:
        self.dense, self.ids, self.labels = dense, ids, labels

    @classmethod
    def of(cls, batch: Batch, names: Sequence[str]) -> TorchrecBatch:
        """Return a batch of a Loader; ``names`` are the features', in the order of its columns."""
        return cls(batch.dense, features(batch.sparse, names), batch.labels)

    def to(self, device: torch.device, non_blocking: bool = False) -> TorchrecBatch:
        parts = (self.dense, self.ids, self.labels)
        moved = [part.to(device=device, non_blocking=non_blocking) for part in parts]
        return TorchrecBatch(*moved)

    def record_stream(self, stream: torch.Stream) -> None:
        for part in (self.dense, self.ids, self.labels):
            part.record_stream(stream)

    def pin_memory(self) -> TorchrecBatch:
        return TorchrecBatch(
            self.dense.pin_memory(),
            self.ids.pin_memory(),
            self.labels.pin_memory(),
        )


class _Head(nn.Module):
    """All layers after the tables.

    TorchRec's pipelines trace a model with torch.fx and take a module without sharded tables as one
    node, so that what depends on sizes stays out of the trace.
    """

    def __init__(self, model: Dlrm, names: list[str]) -> None:
        super().__init__()
        self.names, self.width = names, model.config.embedding_dim
        self.dense_mlp = MLP.from_sequential(model.dense_mlp)
        *hidden, last = model.prediction_mlp
        assert isinstance(last, nn.Linear)
        match model.config.interaction:
            case "dot":
                self.interact: nn.Module = DotInteraction()
            case "cat":
                self.interact = _Cat()
            case _:
                assert isinstance(hidden[0], nn.Linear)
                vectors = len(names) + 1
                self.interact = OuterInteraction.of(hidden[0], vectors, self.width, "relu")
                hidden = hidden[2:]
        self.hidden = MLP.from_sequential(nn.Sequential(*hidden))
        self.last = last

    def forward(
        self, dense: Tensor, embeddings: Any, labels: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        dense = self.dense_mlp(dense)
        # under TorchRec the vectors travel until their values are asked for
        vectors = embeddings.values().view(len(dense), len(self.names), self.width)
        keys = list(embeddings.keys())
        if keys != self.names:  # sharded, TorchRec orders the vectors by rank
            order = torch.tensor([keys.index(name) for name in self.names], device=dense.device)
            vectors = vectors.index_select(1, order)
        hidden = self.hidden(self.interact(dense, vectors))
        weight, bias = self.last.weight, self.last.bias
        loss = linear_binary_cross_entropy(hidden, weight, bias, labels[:, None])
        with torch.no_grad():
            logits = self.last(hidden)[:, 0]
        return loss, (loss.detach(), logits, labels.detach())


class _Cat(nn.Module):
    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return cat_interaction(dense, vectors)


class TorchrecDlrm(nn.Module):
    """The model over the parameters of a ``Dlrm``, which it shares until TorchRec shards them.

    ``embeddings`` is an ``EmbeddingBagCollection``, ``head`` everything after it, and ``names`` are
    the tables' and features' names, in the model's order.
    """

    def __init__(self, model: Dlrm) -> None:
        super().__init__()
        self.names = [f"embedding_{place}" for place in range(len(model.embeddings))]
        tables = [table for table in model.embeddings if isinstance(table, nn.Embedding)]
        collection = FusedEmbeddingCollection.from_embeddings(tables)
        self.embeddings = to_torchrec(collection, self.names)
        self.head = _Head(model, self.names)

    def forward(self, batch: TorchrecBatch) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return the mean loss, 0-d, and (loss, logits [B], labels [B]), detached.

        TorchRec's pipelines differentiate the first and return the second.
        """
        found: tuple[Tensor, tuple[Tensor, Tensor, Tensor]] = self.head(
            batch.dense, self.embeddings(batch.ids), batch.labels
        )
        return found
