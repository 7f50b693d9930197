"""The planner: it chooses each table's placement so that the busiest rank's step is short.

What a rank does for a table in a step, forward and backward, is counted in bytes: over the link
(ids and gradients out, vectors back; for a replicated table the all-reduce of its gradient) and
through its memory (look-up and update). Bandwidths turn bytes into time. No rank waits for a
rank but the busiest, so its time is what the plan makes small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fuselab.distributed.sharding import Placement, Shard, ShardingPlan, even_sizes
from fuselab.errors import ArgumentError

ID_BYTES = 4
_LEAST_COLUMNS = 8  # of a column-wise block: 16 bytes in 16 bits, the least that a load takes
_GAIN = 0.97  # a table is cut only if the busiest rank's time falls below this share


@dataclass(frozen=True)
class Bandwidths:
    """Bytes per second of each rank: ``link`` in each direction, to all other ranks together, and
    ``memory``. The defaults are an H200's NVLink and HBM as published."""

    link: float = 450e9
    memory: float = 4.8e12


@dataclass(frozen=True)
class Demand:
    """The facts that a plan depends on, apart from bandwidths.

    Args:
        tables: rows and columns of each table, float32.
        world_size: how many ranks.
        batch_size: rows of a batch, of all ranks together.
        lookups: how often a row of the batch looks into each table; default: once.
        state_bytes: of the optimizer, per row and per element of a table.
        vector_bytes: of an element of a vector that is sent: 4, or 2 in 16 bits.
        memory_bytes: what each rank has for tables; None: enough.
        columns_allowed: False if the optimizer needs whole rows (row-wise Adagrad's mean).
    """

    tables: tuple[tuple[int, int], ...]
    world_size: int
    batch_size: int
    lookups: tuple[float, ...] | None = None
    state_bytes: tuple[int, int] = (0, 0)
    vector_bytes: int = 4
    memory_bytes: int | None = None
    columns_allowed: bool = True

    def __post_init__(self) -> None:
        if self.world_size < 1 or self.batch_size < self.world_size:
            raise ArgumentError(
                f"a batch of {self.batch_size} rows for {self.world_size} ranks; every rank needs "
                "one row at least."
            )
        if not self.tables or any(min(each) < 1 for each in self.tables):
            raise ArgumentError("the planner needs tables, each of 1 row and 1 column or more.")
        if self.lookups is not None and len(self.lookups) != len(self.tables):
            raise ArgumentError(
                f"{len(self.lookups)} access frequencies for {len(self.tables)} tables; give each "
                "table one."
            )

    def frequency(self, table: int) -> float:
        return 1.0 if self.lookups is None else self.lookups[table]

    def bytes_of(self, rows: int, columns: int) -> int:
        """Return the bytes of a block and of its optimizer state."""
        per_row, per_element = self.state_bytes
        return rows * (columns * (4 + per_element) + per_row)


@dataclass(frozen=True)
class Load:
    """The work of one rank: bytes that it holds, and that it moves in one step.

    ``ids_sent``, ``vectors_sent``, ``gradients_sent`` and ``received`` go over the link,
    ``reduced`` is its share of the all-reduce of replicated tables' gradients (each way), and
    ``memory_moved`` is read and written by look-ups and updates.
    """

    held: float = 0.0
    ids_sent: float = 0.0
    vectors_sent: float = 0.0
    gradients_sent: float = 0.0
    received: float = 0.0
    reduced: float = 0.0
    memory_moved: float = 0.0

    def plus(self, other: Load) -> Load:
        return Load(*(mine + theirs for mine, theirs in zip(_values(self), _values(other))))  # noqa: B905

    def seconds(self, bandwidths: Bandwidths) -> float:
        """Return the time of a step's exchange, look-ups and updates if nothing overlaps."""
        sent = self.ids_sent + self.vectors_sent + self.gradients_sent
        over_link = max(sent, self.received) + self.reduced
        return over_link / bandwidths.link + self.memory_moved / bandwidths.memory


def _values(load: Load) -> tuple[float, ...]:
    return (
        load.held, load.ids_sent, load.vectors_sent, load.gradients_sent, load.received,
        load.reduced, load.memory_moved,
    )  # fmt: skip


def loads(plan: ShardingPlan, demand: Demand) -> list[Load]:
    """Return what each rank holds and moves in one step under the plan."""
    total = [Load()] * plan.world_size
    for table, placement in enumerate(plan.placements):
        total = _added(total, _table_loads(table, placement, demand))
    return total


def choose(demand: Demand, bandwidths: Bandwidths = Bandwidths()) -> ShardingPlan:
    """Return the plan for this demand.

    Tables are placed in order of size. A table is replicated where the all-reduce of its gradient
    costs less than the exchange, and otherwise goes whole to the rank that is then the least busy.
    One that no rank can hold is cut by rows over all ranks. Then the busiest rank's tables are cut,
    by columns if that is allowed and by rows otherwise, as long as this makes its step shorter.

    Raises ArgumentError if the ranks cannot hold the tables together.
    """
    order = sorted(
        range(len(demand.tables)), key=lambda table: -demand.bytes_of(*demand.tables[table])
    )
    placements: dict[int, Placement] = {}
    total = [Load()] * demand.world_size
    for table in order:
        placement = _first_choice(table, total, demand, bandwidths)
        placements[table] = placement
        total = _added(total, _table_loads(table, placement, demand))
    _cut_busiest(placements, total, demand, bandwidths)
    chosen = tuple(placements[table] for table in range(len(demand.tables)))
    return ShardingPlan(demand.world_size, demand.tables, chosen)


def uniform(demand: Demand, kind: str) -> ShardingPlan:
    """Return a plan with one kind for all tables: whole tables in turn, or even cuts.

    A table with fewer rows or columns than ranks is cut over as many ranks as it has of them.
    """
    ranks = range(demand.world_size)
    placements = []
    for place, (rows, columns) in enumerate(demand.tables):
        if kind in ("row", "column"):
            parts = min(demand.world_size, rows if kind == "row" else columns)
            sizes = even_sizes(rows if kind == "row" else columns, parts)
            placements.append(Placement(kind, tuple(ranks[:parts]), sizes))
        else:
            on = (place % demand.world_size,) if kind == "table" else ()
            placements.append(Placement(kind, on))
    return ShardingPlan(demand.world_size, demand.tables, tuple(placements))


def _first_choice(
    table: int, total: Sequence[Load], demand: Demand, bandwidths: Bandwidths
) -> Placement:
    size = demand.bytes_of(*demand.tables[table])
    room = [_room(load, demand) for load in total]
    fitting = [rank for rank in range(demand.world_size) if room[rank] >= size]
    whole = [Placement("table", (rank,)) for rank in fitting]
    if whole:
        best = min(whole, key=lambda each: _after(table, each, total, demand, bandwidths))
        everywhere = Placement("replicated")
        if demand.world_size > 1 and len(fitting) == demand.world_size:
            first, second = (
                sum(load.seconds(bandwidths) for load in _table_loads(table, each, demand))
                for each in (everywhere, best)
            )
            if first < second:
                return everywhere
        return best
    for cut in _cuts(table, demand):
        blocks = _table_loads(table, cut, demand)
        if all(space >= load.held for space, load in zip(room, blocks, strict=True)):
            return cut
    rows, columns = demand.tables[table]
    raise ArgumentError(
        f"table {table} of {rows:,} rows and {columns} columns takes {size / 1e9:.2f} GB with its "
        f"optimizer state, and {demand.world_size} ranks have {sum(room) / 1e9:.2f} GB left; use "
        "more ranks, or smaller tables."
    )


def _room(load: Load, demand: Demand) -> float:
    return float("inf") if demand.memory_bytes is None else demand.memory_bytes - load.held


def _after(
    table: int,
    placement: Placement,
    total: Sequence[Load],
    demand: Demand,
    bandwidths: Bandwidths,
) -> tuple[float, float]:
    """Return the busiest rank's seconds if the table is placed so, then the bytes held there."""
    added = _added(total, _table_loads(table, placement, demand))
    busiest = max(load.seconds(bandwidths) for load in added)
    return busiest, max(load.held for load in added)


def _cuts(table: int, demand: Demand) -> list[Placement]:
    """Return the even cuts of a table over all ranks: by rows, and by columns where allowed."""
    rows, columns = demand.tables[table]
    ranks = tuple(range(demand.world_size))
    found = []
    if rows >= demand.world_size:
        found.append(Placement("row", ranks, even_sizes(rows, demand.world_size)))
    if demand.columns_allowed and columns >= _LEAST_COLUMNS * demand.world_size:
        found.append(Placement("column", ranks, even_sizes(columns, demand.world_size)))
    return found


def _cut_busiest(
    placements: dict[int, Placement],
    total: list[Load],
    demand: Demand,
    bandwidths: Bandwidths,
) -> None:
    while demand.world_size > 1:
        busy = [load.seconds(bandwidths) for load in total]
        rank = busy.index(max(busy))
        mine = [
            table
            for table, placement in placements.items()
            if placement.kind == "table" and placement.ranks == (rank,)
        ]
        best: tuple[float, int, Placement] | None = None
        for table in mine:
            without = _added(total, _table_loads(table, placements[table], demand), -1)
            for cut in _cuts(table, demand):
                after = _added(without, _table_loads(table, cut, demand))
                if any(_room(load, demand) < 0 for load in after):
                    continue
                busiest = max(load.seconds(bandwidths) for load in after)
                if best is None or busiest < best[0]:
                    best = busiest, table, cut
        if best is None or best[0] > _GAIN * max(busy):
            return
        _, table, cut = best
        total[:] = _added(total, _table_loads(table, placements[table], demand), -1)
        total[:] = _added(total, _table_loads(table, cut, demand))
        placements[table] = cut


def _added(total: Sequence[Load], more: Sequence[Load], sign: int = 1) -> list[Load]:
    return [
        one.plus(other if sign > 0 else Load(*(-value for value in _values(other))))
        for one, other in zip(total, more, strict=True)
    ]


def _table_loads(table: int, placement: Placement, demand: Demand) -> list[Load]:
    """Return every rank's load of one table."""
    world, (rows, columns) = demand.world_size, demand.tables[table]
    size = demand.tables[table]
    looked_up = demand.batch_size * demand.frequency(table)
    mine = looked_up / world  # look-ups of one rank's rows
    held = [Load()] * world
    if placement.kind == "replicated":
        gradient = rows * columns * 4
        load = Load(
            held=demand.bytes_of(rows, columns),
            reduced=2 * gradient * (world - 1) / world,
            # read by the look-up; the gradient zeroed and added to; then the update
            memory_moved=3 * mine * columns * 4 + 4 * gradient,
        )
        return [load] * world
    plan = ShardingPlan(world, (size,), (replace(placement),))
    for shard in plan.shards():
        held = _added(held, _shard_loads(shard, size[0], mine, demand))
    return held


def _shard_loads(shard: Shard, rows: int, mine: float, demand: Demand) -> list[Load]:
    """Return every rank's load of a block: its owner's, and those of the ranks that ask."""
    world = demand.world_size
    vectors = mine * shard.columns * demand.vector_bytes  # of one rank's look-ups
    others = world - 1
    met = shard.rows / rows  # of the look-ups, those that fall into the block
    owner = Load(
        held=demand.bytes_of(shard.rows, shard.columns),
        vectors_sent=vectors * others,
        received=(mine * ID_BYTES + vectors) * others,
        # a look-up reads the rows; an update reads gradients, and reads and writes the rows
        memory_moved=world * mine * shard.columns * met * (4 + demand.vector_bytes + 8),
    )
    asking = Load(ids_sent=mine * ID_BYTES, gradients_sent=vectors, received=vectors)
    return [owner if rank == shard.rank else asking for rank in range(world)]


def facts(plan: ShardingPlan, demand: Demand, bandwidths: Bandwidths) -> dict[str, Any]:
    """Return the plan for JSON, with each rank's load; the screen shows the same numbers."""
    return {
        **plan.describe(),
        "link_bytes_per_s": bandwidths.link,
        "memory_bytes_per_s": bandwidths.memory,
        "loads": [
            {
                "held": load.held,
                "sent": load.ids_sent + load.vectors_sent + load.gradients_sent,
                "received": load.received,
                "reduced": load.reduced,
                "memory_moved": load.memory_moved,
                "seconds": load.seconds(bandwidths),
            }
            for load in loads(plan, demand)
        ],
    }
