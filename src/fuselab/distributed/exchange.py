"""The exchange of embeddings: ids go to the rank that has the rows, vectors come back.

Every rank holds some consecutive rows of a batch, and some blocks of tables. For one width of
blocks, a ``Route`` says which tables each rank looks up. One ``all_to_all`` brings it the ids of
all ranks, one brings the vectors back, and in the backward one brings it their gradients. All
three are ordered by rank, so a block's owner has ids and gradients in the order of the whole
batch, and its update adds them up in the order in which one process would.

Sizes depend on the number of rows alone, so nothing waits for a GPU and a CUDA graph can contain
the exchange. A block of some rows of a table gets all ids of that table; it answers with zeros for
rows that it does not have, and the answers are added up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

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
        rows: of each table; ids of tables with at most 65,536 rows are sent in 16 bits.
    """

    def __init__(self, route: Route, ranks: Ranks, rows: Sequence[int]) -> None:
        self.route, self.ranks = route, ranks
        device = ranks.device
        self.mine = route.owners[ranks.rank]
        self.tables = [[shard.table for shard in shards] for shards in route.owners]
        # the blocks of each message: those with short ids first
        short = {place for place, count in enumerate(rows) if count <= 1 << 16}
        self.short = [[table for table in tables if table in short] for tables in self.tables]
        self.long = [[table for table in tables if table not in short] for tables in self.tables]
        order = self.short[ranks.rank] + self.long[ranks.rank]
        # from the order of the message to that of the blocks
        self.place = torch.tensor(
            [order.index(table) for table in self.tables[ranks.rank]],
            dtype=torch.int64,
            device=device,
        )
        self.first_rows = torch.tensor(
            [shard.first_row for shard in self.mine], dtype=torch.int32, device=device
        )
        self.columns = [_index(tables, device) for tables in self.tables]
        self.sent_short = _index([table for each in self.short for table in each], device)
        self.sent_long = _index([table for each in self.long for table in each], device)

    def send_ids(self, rows: Tensor, counts: Sequence[int]) -> Pending:
        """Send ids; the result are those of my blocks, int32 [B, blocks].

        ``rows`` [n, T] are this rank's rows of the tables, and ``counts`` are all ranks' n. A
        block's ids count from its own first row; one outside is negative or past its last row.
        """
        by_table = rows.to(torch.int32).t()
        short = by_table.index_select(0, self.sent_short).to(torch.int16)
        long = by_table.index_select(0, self.sent_long)
        mine = len(rows)
        pieces, sent = [], []
        for shorts, longs, (begin, end), (start, stop) in zip(
            self.short, self.long, _edges(self.short), _edges(self.long), strict=True
        ):
            pieces += [_bytes(short[begin:end]), _bytes(long[start:stop])]
            sent.append(mine * (2 * len(shorts) + 4 * len(longs)))
        per_row = 2 * len(self.short[self.ranks.rank]) + 4 * len(self.long[self.ranks.rank])
        received = [count * per_row for count in counts]
        group = self.ranks.ids
        buffer, work = self._all_to_all(torch.cat(pieces), sent, received, group)
        return Pending(lambda: self._ids(buffer, counts), work)

    def _ids(self, buffer: Tensor, counts: Sequence[int]) -> Tensor:
        """Return the ids of a message, [B, blocks]."""
        short, long = len(self.short[self.ranks.rank]), len(self.long[self.ranks.rank])
        parts = []
        per_row = 2 * short + 4 * long
        for piece, count in zip(
            buffer.split([count * per_row for count in counts]), counts, strict=True
        ):
            # a copy begins at an address that int32 may have
            narrow = piece[: 2 * short * count].clone().view(torch.int16)
            wide = piece[2 * short * count :].clone().view(torch.int32)
            parts.append(
                torch.cat(
                    [(narrow.to(torch.int32) & 0xFFFF).view(short, count), wide.view(long, count)]
                )
            )
        ids = torch.cat(parts, 1).index_select(0, self.place).t().contiguous()
        return ids - self.first_rows

    def send_vectors(self, vectors: Tensor, counts: Sequence[int]) -> Pending:
        """Send looked-up vectors [B, blocks, columns] to the ranks that asked.

        The result has the vectors of this rank's n rows from all blocks, [n * blocks * columns],
        by owner; ``parts`` cuts it.
        """
        width = self.route.columns
        mine = counts[self.ranks.rank]
        sent = [count * len(self.mine) * width for count in counts]
        received = [mine * len(shards) * width for shards in self.route.owners]
        buffer, work = self._all_to_all(vectors.reshape(-1), sent, received)
        return Pending(lambda: buffer, work)

    def parts(self, buffer: Tensor, rows: int) -> list[Tensor]:
        """Return a received buffer as [n, blocks, columns] for every owner."""
        width = self.route.columns
        sizes = [rows * len(shards) * width for shards in self.route.owners]
        return [
            part.view(rows, len(shards), width)
            for part, shards in zip(buffer.split(sizes), self.route.owners, strict=True)
        ]

    def send_gradients(self, grad: Tensor, counts: Sequence[int]) -> Pending:
        """Send the gradients of this rank's vectors [n, T, D] to the blocks' owners.

        The result is the gradient of my blocks' vectors, [B, blocks, columns].
        """
        width, mine = self.route.columns, len(grad)
        sent = [mine * len(shards) * width for shards in self.route.owners]
        buffer = grad.new_empty(sum(sent))
        for part, shards, columns in zip(
            self.parts(buffer, mine), self.route.owners, self.columns, strict=True
        ):
            if width == grad.shape[2]:
                torch.index_select(grad, 1, columns, out=part)
                continue
            for place, shard in enumerate(shards):
                begin = shard.first_column
                part[:, place] = grad[:, shard.table, begin : begin + width]
        received = [count * len(self.mine) * width for count in counts]
        found, work = self._all_to_all(buffer, sent, received)
        return Pending(lambda: found.view(sum(counts), len(self.mine), width), work)

    def _all_to_all(
        self, buffer: Tensor, sent: list[int], received: list[int], group: object = None
    ) -> tuple[Tensor, dist.Work | None]:
        if self.ranks.world_size == 1:
            return buffer, None
        found = buffer.new_empty(sum(received))
        work = dist.all_to_all_single(found, buffer, received, sent, group=group, async_op=True)
        return found, work


def _bytes(values: Tensor) -> Tensor:
    return values.contiguous().view(-1).view(torch.uint8)


def _index(places: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(list(places), dtype=torch.int64, device=device)


def _edges(groups: Sequence[Sequence[int]]) -> list[tuple[int, int]]:
    return list(pairwise(accumulate((len(group) for group in groups), initial=0)))
