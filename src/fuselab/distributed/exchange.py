"""The exchange of embeddings: ids go to the rank that has the rows, vectors come back.

Every rank holds some consecutive rows of a batch, and some blocks of tables. For one width of
blocks, a ``Route`` says which tables each rank looks up. One ``all_to_all`` brings it the ids of
all ranks, one brings the vectors back, and in the backward one brings it their gradients. All
three are ordered by rank, so a block's owner has ids and gradients in the order of the whole
batch, and its update adds them up in the order in which one process would.

Sizes depend on the number of rows alone, so nothing waits for a GPU and a CUDA graph can contain
the exchange. One launch writes all messages of a transfer, and one reads them. A block of some rows
of a table gets all ids of that table; it answers with zeros for rows that it does not have, and the
answers are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from fuselab.distributed.exchange_layout import IdLayout, Piece, VectorLayout, pieces_of
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Shard, ShardingPlan
from fuselab.errors import UnknownNameError

WIRE_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def wire_dtype(name: str) -> torch.dtype:
    """Return the dtype in which vectors and gradients are sent. Raises UnknownNameError."""
    if name not in WIRE_DTYPES:
        raise UnknownNameError("exchange dtype", name, WIRE_DTYPES)
    return WIRE_DTYPES[name]


@dataclass(frozen=True)
class Route:
    """All blocks of one width: ``owners[r]`` are rank r's, in the order of its messages."""

    columns: int
    owners: tuple[tuple[Shard, ...], ...]

    @property
    def in_parts(self) -> bool:
        """Whether some block lacks rows of its table."""
        return any(shard.first_row for shards in self.owners for shard in shards)


def routes(plan: ShardingPlan) -> list[Route]:
    """Return the plan's blocks by width, the widest first."""
    every = plan.shards()
    return [
        Route(
            columns,
            tuple(
                tuple(shard for shard in every if (shard.rank, shard.columns) == (rank, columns))
                for rank in range(plan.world_size)
            ),
        )
        for columns in sorted({shard.columns for shard in every}, reverse=True)
    ]


class Pending:
    """A transfer under way; ``result`` waits for it on the current stream."""

    def __init__(self, finish: Callable[[], Tensor], work: dist.Work | None) -> None:
        self._finish, self._work = finish, work
        self._found: Tensor | None = None

    def result(self) -> Tensor:
        if self._found is None:
            if self._work is not None:
                self._work.wait()
            self._found = self._finish()
        return self._found


class Exchange:
    """The transfers of one route, for this rank.

    Args:
        route: the blocks.
        ranks: the processes.
        tables: rows and columns of each table; the columns are all the same. Ids of tables with at
            most 65,536 rows are sent in 16 bits.
    """

    def __init__(self, route: Route, ranks: Ranks, tables: Sequence[tuple[int, int]]) -> None:
        self.route, self.ranks = route, ranks
        self.mine = route.owners[ranks.rank]
        self.id_layout = IdLayout(
            [[shard.table for shard in shards] for shards in route.owners],
            ranks.rank,
            [rows for rows, _ in tables],
            [shard.first_row for shard in self.mine],
            ranks.device,
        )
        width = tables[0][1]
        targets: dict[int, list[Piece]] = {}
        messages = pieces_of([[route.columns] * len(shards) for shards in route.owners])
        for shards, pieces in zip(route.owners, messages, strict=True):
            for shard, piece in zip(shards, pieces, strict=True):
                # blocks of some rows of a table have one target: all but one answer with zeros
                targets.setdefault(shard.table * width + shard.first_column, []).append(piece)
        self.vector_layout = VectorLayout(
            sorted(targets.items()), route.columns, len(tables) * width, ranks.device
        )
        self.widths = [len(shards) * route.columns for shards in route.owners]

    def send_ids(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Send ids; the result are those of my blocks, int32 [B, blocks].

        ``rows`` [n, T] are this rank's rows of the tables, and ``counts`` are all ranks' n. A
        block's ids count from its own first row; one outside is negative or past its last row.
        """
        sent = [2 * len(rows) * units for units in self.id_layout.units]
        received = [2 * count * self.id_layout.mine for count in counts]
        messages = self.id_layout.pack(rows)
        buffer, work = self._all_to_all(messages, sent, received, self.ranks.ids)
        return Pending(lambda: self.id_layout.unpack(buffer, sum(counts)), work)

    def send_vectors(self, vectors: Tensor, counts: Sequence[int]) -> Pending:
        """Send looked-up vectors [B, blocks, columns] to the ranks that asked.

        The result are the messages of all blocks' owners to this rank, which ``vector_layout``
        reads.
        """
        mine = self.widths[self.ranks.rank]
        sent = [count * mine for count in counts]
        received = [counts[self.ranks.rank] * width for width in self.widths]
        buffer, work = self._all_to_all(vectors.reshape(-1), sent, received)
        return Pending(lambda: buffer, work)

    def send_gradients(self, grad: Tensor, counts: Sequence[int], wire: torch.dtype) -> Pending:
        """Send the gradients of this rank's vectors [n, T, D] to the blocks' owners.

        The result is the gradient of my blocks' vectors, [B, blocks, columns], in ``wire``.
        """
        sent = [len(grad) * width for width in self.widths]
        received = [count * self.widths[self.ranks.rank] for count in counts]
        buffer = grad.new_empty(sum(sent), dtype=wire)
        self.vector_layout.scatter(grad, buffer)
        found, work = self._all_to_all(buffer, sent, received)
        shape = sum(counts), len(self.mine), self.route.columns
        return Pending(lambda: found.view(shape), work)

    def _all_to_all(
        self, buffer: Tensor, sent: list[int], received: list[int], group: object = None
    ) -> tuple[Tensor, dist.Work | None]:
        if self.ranks.world_size == 1:
            return buffer, None
        found = buffer.new_empty(sum(received))
        work = dist.all_to_all_single(found, buffer, received, sent, group=group, async_op=True)
        return found, work
