"""Mapping ids to rows of the embedding tables, by modulus or by a vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy
import numpy.typing

from fuselab.data.layout import KAGGLE_CARDINALITIES, SPARSE_COLUMNS
from fuselab.errors import ArgumentError

Ids = numpy.typing.NDArray[numpy.int64]
LARGEST_INDEX = 2**31 - 1  # an index is stored as int32


@dataclass(frozen=True)
class Modulus:
    """Maps an id to ``(id + 1) % cardinality``: a missing id (-1) goes to 0, and ids may collide.

    Raises ArgumentError unless there are 26 cardinalities from 1 to 2^31 - 1.
    """

    cardinalities: tuple[int, ...] = KAGGLE_CARDINALITIES

    def __post_init__(self) -> None:
        check_cardinalities(self.cardinalities)

    @classmethod
    def capped(cls, largest_table: int) -> Modulus:
        """Return the modulus by the Kaggle set's cardinalities, limited to ``largest_table``."""
        return cls(tuple(min(size, largest_table) for size in KAGGLE_CARDINALITIES))

    def indices(self, ids: Ids) -> Ids:
        """Map ids [n, 26] to indices, column c below ``cardinalities[c]``."""
        indices: Ids = (ids + 1) % numpy.array(self.cardinalities)
        return indices


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Maps an id to its place in its column's sorted ``values``; all others share one last slot.

    A missing id (-1) is an id like any other: it has a place if it was frequent enough. Raises
    ArgumentError unless there are 26 columns, each strictly increasing.
    """

    values: Sequence[Ids]

    def __post_init__(self) -> None:
        check_cardinalities(self.cardinalities)
        for column, values in enumerate(self.values, 1):
            if (numpy.diff(values) <= 0).any():
                raise ArgumentError(f"the vocabulary of C{column} is not strictly increasing.")

    @property
    def cardinalities(self) -> tuple[int, ...]:
        """The number of rows of each table: the values, and one for unknown ids."""
        return tuple(len(values) + 1 for values in self.values)

    def indices(self, ids: Ids) -> Ids:
        """Map ids [n, 26] to indices, column c below ``cardinalities[c]``."""
        indices = numpy.empty(ids.shape, dtype=numpy.int64)
        for column, values in enumerate(self.values):
            wanted = ids[:, column]
            place = numpy.searchsorted(values, wanted)
            if len(values):
                known = values[numpy.minimum(place, len(values) - 1)] == wanted
                place[~known] = len(values)
            indices[:, column] = place
        return indices


def check_cardinalities(cardinalities: Sequence[int]) -> None:
    """Raise ArgumentError unless there are 26, each from 1 to 2^31 - 1."""
    if len(cardinalities) != SPARSE_COLUMNS:
        raise ArgumentError(
            f"there are {len(cardinalities)} cardinalities; expected one for each of the "
            f"{SPARSE_COLUMNS} categorical columns."
        )
    for column, size in enumerate(cardinalities, 1):
        if not 1 <= size <= LARGEST_INDEX:
            raise ArgumentError(
                f"the cardinality of C{column} is {size}; expected 1 to {LARGEST_INDEX}."
            )
