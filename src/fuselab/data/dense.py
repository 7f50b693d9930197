"""Transforms of counts to the input of the first layer, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import numpy.typing

from fuselab.data.layout import DENSE_COLUMNS, Counts, is_missing
from fuselab.errors import ArgumentError, UnknownNameError

TRANSFORMS = ("log1p", "log3", "shifted")
Floats = numpy.typing.NDArray[numpy.float32]


@dataclass(frozen=True)
class Dense:
    """A transform of counts to float32; a missing count is taken as 0.

    ``log1p`` is log(max(x, 0) + 1), the original DLRM's; ``log3`` is log(max(x, -2) + 3);
    ``shifted`` is log(max(x, m) - (m - 2)), where m is the column's smallest value in the training
    rows. The three give different models, so AUCs may be compared only within one of them.

    Raises UnknownNameError for another name, ArgumentError for ``shifted`` without its 13 minima.
    """

    name: str = "log1p"
    smallest: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if self.name not in TRANSFORMS:
            raise UnknownNameError("dense transform", self.name, TRANSFORMS)
        if self.name == "shifted" and len(self.smallest or ()) != DENSE_COLUMNS:
            raise ArgumentError(
                "the dense transform 'shifted' needs the smallest value of each of the "
                f"{DENSE_COLUMNS} columns; prepare the data, which counts them, or name another."
            )

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Dense:
        """Rebuild the transform from the result of ``asdict``, as JSON gives it back."""
        smallest = facts["smallest"]
        return cls(facts["name"], None if smallest is None else tuple(smallest))

    def __call__(self, counts: Counts) -> Floats:
        """Transform ``counts`` [n, 13] to float32 of the same shape."""
        if self.name == "log1p":
            return log_counts(counts)
        values = numpy.where(is_missing(counts), 0, counts).astype(numpy.float32)
        if self.name == "log3":
            shifted = numpy.maximum(values, -2) + 3
        else:
            low = numpy.array(self.smallest, dtype=numpy.float32)
            shifted = numpy.maximum(values - low, 0) + 2
        logarithms: Floats = numpy.log(shifted)
        return logarithms


def log_counts(counts: Counts) -> Floats:
    """Return log(max(count, 0) + 1) in float32; a missing count becomes 0.

    MISSING_COUNT is negative and ``fmax`` drops NaN, so ``fmax`` handles both.
    """
    return numpy.log1p(numpy.fmax(counts, 0).astype(numpy.float32))
