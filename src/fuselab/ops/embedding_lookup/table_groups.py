"""Tables as kernels take them: the struct of tables.h, passed by value, at most 256 tables each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from torch import Tensor

from fuselab.runtime.parameters import Struct

MOST = 256
CAPACITIES = (32, MOST)


def alignment(*places: int) -> int:
    """Return the largest power of two up to 16 that divides all these addresses and distances."""
    bits = 16
    for place in places:
        bits |= place
    return bits & -bits


@dataclass(frozen=True)
class Group:
    """Consecutive tables; None stands for a table that is not changed. ``rows`` are the row counts
    of all of them, ``states`` those of row-wise Adagrad, ``columns`` their columns in the ids."""

    tables: tuple[Tensor | None, ...]
    rows: tuple[int, ...]
    states: tuple[Tensor, ...]
    columns: slice

    @property
    def all_rows(self) -> int:
        return sum(self.rows)

    @property
    def capacity(self) -> int:
        """The number of tables that the struct of ``description`` has room for."""
        return next(size for size in CAPACITIES if size >= len(self.tables))

    @property
    def addresses(self) -> list[int]:
        return [table.data_ptr() if table is not None else 0 for table in self.tables]

    @property
    def pitches(self) -> list[int]:
        return [
            table.stride(0) * table.element_size() if table is not None else 0
            for table in self.tables
        ]

    def description(self, capacity: int | None = None) -> Struct:
        """Return the struct ``Tables<capacity>`` of tables.h."""
        capacity = capacity or self.capacity
        first = [0, *accumulate(self.rows)][:-1]
        arrays = (self.tables, self.pitches, self.rows, first, self.states)
        return Struct.of_arrays(capacity, arrays)


def groups(
    tables: Sequence[Tensor | None], rows: Sequence[int], states: Sequence[Tensor] = ()
) -> Iterator[Group]:
    """Yield the tables in groups that fit one launch."""
    for begin in range(0, len(tables), MOST):
        part = slice(begin, begin + MOST)
        yield Group(tuple(tables[part]), tuple(rows[part]), tuple(states[part]), part)


WIDEST_UPDATE = 1024  # columns of a row that a GPU can change: they fit in a warp's registers


def too_wide(width: int) -> str | None:
    """Return the reason why rows of this width cannot be changed on a GPU, or None."""
    return f"rows are wider than {WIDEST_UPDATE}" if width > WIDEST_UPDATE else None


def tables_too_wide(tables: Sequence[Tensor]) -> str | None:
    """Return ``too_wide`` of the widest table; it may be asked before they are validated."""
    return too_wide(max((table.shape[1] for table in tables if table.dim() == 2), default=0))


def scattered(tables: Sequence[Tensor]) -> str | None:
    """Return the reason why the kernels cannot read these tables, or None. It may be asked before
    the tables are validated."""
    if any(table.dim() == 2 and table.shape[1] > 1 and table.stride(1) != 1 for table in tables):
        return "a row of a table is not contiguous"
    return None
