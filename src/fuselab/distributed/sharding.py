"""A sharding plan: which rank holds which rows and columns of every embedding table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from fuselab.errors import ArgumentError, UnknownNameError
from fuselab.report import files

FORMAT, VERSION = "fuselab-sharding-plan", 1
KINDS = ("table", "column", "row", "replicated")


@dataclass(frozen=True)
class Shard:
    """A block of one table on one rank: ``rows`` from ``first_row``, ``columns`` from
    ``first_column``."""

    table: int
    rank: int
    first_row: int
    rows: int
    first_column: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns


@dataclass(frozen=True)
class Placement:
    """The place of one table.

    Kind ``"table"``: the table is whole on one rank. ``"row"`` and ``"column"``: the table is cut
    into ``sizes`` rows or columns, one block for each of ``ranks``. ``"replicated"``: every rank
    has the table, ``ranks`` is empty, and the copies are kept equal.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    sizes: tuple[int, ...] = ()


@dataclass(frozen=True)
class ShardingPlan:
    """The placements of all tables, in the model's order.

    Args:
        world_size: how many ranks there are.
        tables: rows and columns of each table.
        placements: one per table.

    Raises ArgumentError, naming the table, if a placement does not cover its table once, or names
    a rank that does not exist, and UnknownNameError for an unknown kind.
    """

    world_size: int
    tables: tuple[tuple[int, int], ...]
    placements: tuple[Placement, ...]

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ArgumentError(f"the plan is for {self.world_size} ranks; give 1 or more.")
        if len(self.placements) != len(self.tables):
            raise ArgumentError(
                f"the plan places {len(self.placements)} tables of {len(self.tables)}; give each "
                "table one placement."
            )
        for place, (size, placement) in enumerate(zip(self.tables, self.placements, strict=True)):
            _check(place, size, placement, self.world_size)

    def shards(self, rank: int | None = None) -> list[Shard]:
        """Return the blocks of all ranks, or of one, by table and then by first row and column.

        Replicated tables have none.
        """
        found = [
            shard
            for place, (size, placement) in enumerate(
                zip(self.tables, self.placements, strict=True)
            )
            for shard in _shards(place, size, placement)
        ]
        return found if rank is None else [shard for shard in found if shard.rank == rank]

    @property
    def replicated(self) -> list[int]:
        """The numbers of the tables that every rank has."""
        return [
            place
            for place, placement in enumerate(self.placements)
            if placement.kind == "replicated"
        ]

    def write(self, path: Path) -> None:
        """Write the plan as JSON. Raises OutputError."""
        files.write_json(path, self.describe())

    def describe(self) -> dict[str, Any]:
        """Return the plan as JSON has it."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "ranks": self.world_size,
            "tables": [
                {
                    "rows": rows,
                    "columns": columns,
                    "kind": placement.kind,
                    "ranks": list(placement.ranks),
                    "sizes": list(placement.sizes),
                }
                for (rows, columns), placement in zip(self.tables, self.placements, strict=True)
            ],
        }

    @classmethod
    def of(cls, facts: Mapping[str, Any], name: str = "the plan") -> ShardingPlan:
        """Return the plan that ``describe`` described.

        Raises ArgumentError, beginning with ``name``, if the facts are not a plan's.
        """
        if not isinstance(facts, Mapping) or facts.get("format") != FORMAT:
            raise ArgumentError(
                f"{name} is no sharding plan of fuselab; --save-plan FILE writes one."
            )
        if facts.get("version") != VERSION:
            raise ArgumentError(
                f"{name} has version {facts.get('version')}, and this fuselab reads version "
                f"{VERSION}; make the plan again."
            )
        try:
            tables = tuple(
                (_whole(each["rows"]), _whole(each["columns"])) for each in _tables(facts)
            )
            placements = tuple(
                Placement(str(each["kind"]), _wholes(each["ranks"]), _wholes(each["sizes"]))
                for each in _tables(facts)
            )
            ranks = _whole(facts["ranks"])
        except (KeyError, TypeError, ValueError) as error:
            missing = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise ArgumentError(
                f"{name} is malformed: {missing}; --save-plan FILE writes a right one."
            ) from error
        try:
            return cls(ranks, tables, placements)
        except (ArgumentError, UnknownNameError) as error:
            raise ArgumentError(f"{name}: {error}") from error

    @classmethod
    def read(cls, path: Path, tables: Sequence[tuple[int, int]], world_size: int) -> ShardingPlan:
        """Return the plan of a file, for tables of these rows and columns on so many ranks.

        Raises ArgumentError if the file cannot be read or holds another plan.
        """
        try:
            facts = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise ArgumentError(f"cannot read {path}: {reason}; name a sharding plan.") from error
        except ValueError as error:
            raise ArgumentError(f"{path} is no JSON: {error}.") from error
        plan = cls.of(facts, str(path))
        if plan.world_size != world_size:
            raise ArgumentError(
                f"{path} is a plan for {plan.world_size} ranks, and {world_size} run; leave out "
                "--plan, or run as many."
            )
        for place, (planned, real) in enumerate(zip(plan.tables, tables, strict=False)):
            if planned != tuple(real):
                raise ArgumentError(
                    f"{path}: table {place} has {planned[0]} rows of {planned[1]} columns there, "
                    f"and {real[0]} of {real[1]} in this model; make the plan for this model."
                )
        if len(plan.tables) != len(tables):
            raise ArgumentError(
                f"{path} plans {len(plan.tables)} tables, and this model has {len(tables)}; make "
                "the plan for this model."
            )
        return plan


def even_sizes(total: int, parts: int) -> tuple[int, ...]:
    """Return ``total`` as a sum of ``parts`` numbers that differ by at most one."""
    return tuple(total * (part + 1) // parts - total * part // parts for part in range(parts))


def _tables(facts: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    found = facts["tables"]
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise TypeError("'tables' is no list of objects")
    return found


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{json.dumps(value, default=str)} stands where an integer is expected")
    return value


def _wholes(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{json.dumps(values, default=str)} stands where a list is expected")
    return tuple(_whole(value) for value in values)


def _check(place: int, size: tuple[int, int], placement: Placement, world_size: int) -> None:
    kind, ranks = placement.kind, placement.ranks
    if kind not in KINDS:
        raise UnknownNameError(f"kind of table {place}", kind, KINDS)
    if min(size) < 1:
        raise ArgumentError(f"table {place} has {size[0]} rows of {size[1]} columns; give >= 1.")
    for rank in ranks:
        if not 0 <= rank < world_size:
            raise ArgumentError(
                f"table {place} is on rank {rank}, and the ranks are 0 to {world_size - 1}."
            )
    if len(set(ranks)) != len(ranks):
        raise ArgumentError(f"table {place} names a rank twice; give each rank one block.")
    blocks = {"table": 1, "replicated": 0}.get(kind)
    if blocks is not None and (len(ranks) != blocks or placement.sizes):
        raise ArgumentError(
            f"table {place} of kind '{kind}' has {len(ranks)} ranks and {len(placement.sizes)} "
            f"sizes; it takes {blocks} and 0."
        )
    if blocks is None:
        total = size[0] if kind == "row" else size[1]
        if len(placement.sizes) != len(ranks) or not ranks:
            raise ArgumentError(
                f"table {place} has {len(ranks)} ranks and {len(placement.sizes)} sizes; give one "
                "size for each rank."
            )
        if min(placement.sizes) < 1 or sum(placement.sizes) != total:
            raise ArgumentError(
                f"table {place} is cut into {list(placement.sizes)} {kind}s, and it has {total}; "
                "the sizes are 1 or more each, and that many in all."
            )


def _shards(place: int, size: tuple[int, int], placement: Placement) -> Iterator[Shard]:
    rows, columns = size
    if placement.kind == "table":
        yield Shard(place, placement.ranks[0], 0, rows, 0, columns)
    edges = pairwise(accumulate(placement.sizes, initial=0))
    for rank, (begin, end) in zip(placement.ranks, edges, strict=False):
        if placement.kind == "row":
            yield Shard(place, rank, begin, end - begin, 0, columns)
        elif placement.kind == "column":
            yield Shard(place, rank, 0, rows, begin, end - begin)
