"""Embedding tables shared out over the ranks of a run, and their look-up across ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuselab.distributed.exchange import Exchange, Pending, routes
from fuselab.distributed.exchange_layout import VectorLayout, pieces_of
from fuselab.distributed.ranks import Ranks
from fuselab.distributed.sharding import Shard, ShardingPlan

LookUp = Callable[[Sequence[Tensor], Tensor, str], Tensor]


class Asked(NamedTuple):
    """A batch whose ids are on their way.

    ``rows`` [n, T] are this rank's, ``counts`` all ranks' numbers of rows.
    """

    rows: Tensor
    counts: list[int]
    ids: list[Pending]  # one per route


class Vectors(NamedTuple):
    """Vectors that are on their way to the ranks that asked for them."""

    local: Tensor | None  # those of replicated tables, [n, R, D]
    rows: int
    sent: list[Pending]  # one per route


class ShardedTables:
    """The tables of a plan, of which this rank holds its blocks.

    ``blocks`` are this rank's parameters by route, and ``copies`` those of replicated tables. They
    are not filled; ``fill`` does it.

    Args:
        plan: where the tables are. They have one width.
        ranks: the processes.
        wire: the dtype in which vectors and gradients are sent.
    """

    def __init__(self, plan: ShardingPlan, ranks: Ranks, wire: torch.dtype = torch.float32) -> None:
        self.plan, self.ranks, self.wire = plan, ranks, wire
        self.width = plan.tables[0][1]
        self.exchanges = [Exchange(route, ranks, plan.tables) for route in routes(plan)]
        self.blocks = [
            [self._empty(shard.rows, shard.columns) for shard in exchange.mine]
            for exchange in self.exchanges
        ]
        self.replicated = plan.replicated
        self.copies = [self._empty(*plan.tables[table]) for table in self.replicated]
        self.columns = torch.tensor(self.replicated, dtype=torch.int64, device=ranks.device)
        (pieces,) = pieces_of([[self.width] * len(self.replicated)])
        self.local_layout = VectorLayout(
            [
                (table * self.width, [piece])
                for table, piece in zip(self.replicated, pieces, strict=True)
            ],
            self.width,
            len(plan.tables) * self.width,
            ranks.device,
        )

    def _empty(self, rows: int, columns: int) -> nn.Parameter:
        return nn.Parameter(torch.empty(rows, columns, device=self.ranks.device))

    def held(self) -> Iterator[tuple[Shard | int, nn.Parameter]]:
        """Yield this rank's parameters: a block's with its shard, a copy's with its table."""
        for exchange, blocks in zip(self.exchanges, self.blocks, strict=True):
            yield from zip(exchange.mine, blocks, strict=True)
        yield from zip(self.replicated, self.copies, strict=True)

    def fill(self, table: int, values: Tensor) -> None:
        """Copy what this rank holds of a whole table [rows, D]."""
        with torch.no_grad():
            for what, parameter in self.held():
                if isinstance(what, Shard) and what.table == table:
                    parameter.copy_(cut(values, what))
                elif what == table:
                    parameter.copy_(values)

    def ask(self, rows: Tensor, counts: list[int]) -> Asked:
        """Send the ids of this rank's rows [n, T] to the owners of the tables.

        All ranks call it together; ``counts`` says how many rows each has, which may be 0.
        """
        return Asked(rows, counts, [exchange.send_ids(rows, counts) for exchange in self.exchanges])

    def ids(self, asked: Asked) -> list[Tensor]:
        """Return the ids that this rank's blocks were asked for, [B, blocks] for each route."""
        return [pending.result() for pending in asked.ids]

    def send(
        self, ids: Sequence[Tensor], rows: Tensor, counts: list[int], look_up: LookUp
    ) -> Vectors:
        """Look up the ids in this rank's blocks, and send the vectors.

        ``look_up(tables, ids, out_of_range)`` returns [B, blocks, columns]; with ``"ignore"`` ids
        out of range give zeros.
        """
        local = None
        if self.copies:
            local = look_up(self.copies, rows.index_select(1, self.columns), "error")
        sent = []
        for exchange, blocks, asked in zip(self.exchanges, self.blocks, ids, strict=True):
            if blocks:
                vectors = look_up(blocks, asked, self.out_of_range(exchange)).to(self.wire)
            else:
                vectors = torch.empty(0, dtype=self.wire, device=self.ranks.device)
            sent.append(exchange.send_vectors(vectors, counts))
        return Vectors(local, len(rows), sent)

    def receive(self, vectors: Vectors, dtype: torch.dtype) -> Tensor:
        """Return the vectors of this rank's rows, [n, T, D], in ``dtype``."""
        found = torch.empty(
            vectors.rows, len(self.plan.tables), self.width, dtype=dtype, device=self.ranks.device
        )
        for exchange, pending in zip(self.exchanges, vectors.sent, strict=True):
            exchange.vector_layout.gather(pending.result(), found)
        if vectors.local is not None:
            self.local_layout.gather(vectors.local, found)
        return found

    def send_gradients(self, grad: Tensor, counts: list[int]) -> list[Pending]:
        """Send the gradients of this rank's vectors [n, T, D] to the blocks' owners.

        There is one result per route, [B, blocks, columns], in the order of ``ids``.
        """
        return [exchange.send_gradients(grad, counts, self.wire) for exchange in self.exchanges]

    @staticmethod
    def out_of_range(exchange: Exchange) -> str:
        """Return the rule of the route's look-up and update: ids of other blocks are ignored."""
        return "ignore" if exchange.route.in_parts else "error"


def cut(values: Tensor, shard: Shard) -> Tensor:
    """Return the shard's block of a whole table [rows, D], or its part of a state [rows]."""
    rows = values[shard.first_row : shard.first_row + shard.rows]
    if values.dim() == 1:
        return rows
    return rows[:, shard.first_column : shard.first_column + shard.columns]
