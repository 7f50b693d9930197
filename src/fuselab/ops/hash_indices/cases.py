"""The cases and draws of ``hash_indices``."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import CPU_ROWS, KAGGLE_CARDINALITIES
from fuselab.ops._shared.indices import ID_DTYPES


def _case(rows: int, cardinalities: Sequence[int], *tags: str, name: str = "") -> Case:
    """Return a case of 32-bit ids, as hashed strings give (Criteo's), some missing (-1)."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        ids = torch.randint(-1, 2**32 - 1, (rows, len(cardinalities)), generator=generator)
        bounds = torch.tensor(cardinalities, dtype=torch.int64)
        return Inputs((ids.to(device), bounds.to(device)))

    return Case(name or f"{rows}x{len(cardinalities)}", make, frozenset(tags))


def _extremes(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Build ids at both ends of int64 and of 32 bits, and cardinalities at both ends."""
    ends = [0, 1, -1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, -(2**31), 2**63 - 1, -(2**63)]
    bounds = torch.tensor([1, 2, 3, 2**31 - 1, 2**31, 2**32, 2**32 + 1, 2**63 - 1])
    ids = torch.tensor(ends)[:, None].expand(-1, len(bounds))
    return Inputs((ids.to(device), bounds.to(device)))


CPU_CASES = tuple(_case(rows, KAGGLE_CARDINALITIES, *cpu_sizes.ROW) for rows in CPU_ROWS)


CASES = (
    _case(128, KAGGLE_CARDINALITIES, "bench", "sweep", "tiny"),
    _case(2048, KAGGLE_CARDINALITIES, "bench", "sweep"),
    _case(65536, KAGGLE_CARDINALITIES, "bench", "sweep"),
    Case("extremes", _extremes, frozenset({"boundary"})),
    *(_case(rows, (7, 1, 105), "boundary") for rows in (0, 1, 2, 3, 341, 342)),
    _case(1024, (5,), "boundary"),
    _case(1025, (5,), "boundary"),
    _case(3, (), "boundary", name="no columns"),
)


def draw(draw: Draw) -> Inputs:
    rows, columns = draw.size(341), draw.size(26)
    dtype = draw.choice(ID_DTYPES)
    limits = torch.iinfo(dtype)
    ids = draw.integers(rows, columns, low=limits.min, high=limits.max, dtype=dtype)
    largest = draw.choice((10, 2**31 - 1))
    return Inputs((ids, draw.integers(columns, low=1, high=largest, dtype=draw.choice(ID_DTYPES))))


def space(draw: Draw) -> Inputs:
    """Draw the columns of a click log, hashed into up to two thousand million rows."""
    rows, columns = draw.size(), draw.choice((1, 8, 26, 39, 128))
    dtype = draw.choice(ID_DTYPES)
    limits = torch.iinfo(dtype)
    ids = draw.integers(rows, columns, low=limits.min, high=limits.max, dtype=dtype)
    largest = draw.choice((1000, 10_000_000, 2**31 - 1))
    return Inputs((ids, draw.integers(columns, low=1, high=largest)))
