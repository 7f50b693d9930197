"""The cases and draws of ``vocabulary_indices``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import CPU_ROWS, KAGGLE_CARDINALITIES
from fuselab.ops._shared.indices import ID_DTYPES
from fuselab.ops.vocabulary_indices.reference import vocabulary


def _case(rows: int, sizes: Sequence[int], *tags: str, name: str = "") -> Case:
    """Return a case of vocabularies of ``sizes`` scattered 32-bit ids, unsorted; of the ids looked
    up about a fifth are unknown."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        step = 2**32 // max((*sizes, 1))
        columns = [
            torch.randperm(size, generator=generator) * step - (place % 2)
            for place, size in enumerate(sizes)
        ]
        ids = torch.randint(-1, 2**32, (rows, len(sizes)), generator=generator)
        known = torch.rand(ids.shape, generator=generator) < 0.8
        for place, column in enumerate(columns):
            if len(column):
                picked = column[torch.randint(len(column), (rows,), generator=generator)]
                ids[:, place] = torch.where(known[:, place], picked, ids[:, place])
        return Inputs(tuple(tensor.to(device) for tensor in (ids, *vocabulary(columns))))

    return Case(name or f"{rows}x{len(sizes)}", make, frozenset(tags))


_KAGGLE = tuple(min(size, 1_000_000) for size in KAGGLE_CARDINALITIES)


CPU_CASES = tuple(_case(rows, _KAGGLE, *cpu_sizes.ROW) for rows in CPU_ROWS)


CASES = (
    _case(128, _KAGGLE, "bench", "sweep", "tiny"),
    _case(2048, _KAGGLE, "bench", "sweep"),
    _case(65536, _KAGGLE, "bench", "sweep"),
    *(_case(rows, (1, 0, 2, 3, 7, 8, 9, 1000), "boundary") for rows in (0, 1, 2, 3, 65)),
    _case(1025, (5,), "boundary"),
    _case(3, (0,), "boundary", name="an empty vocabulary"),
    _case(3, (), "boundary", name="no columns"),
)


def draw(draw: Draw) -> Inputs:
    """Draw vocabularies over a small range of ids, so that ids are known as well as unknown."""
    rows, columns = draw.size(511), draw.size(26)
    generator = torch.Generator().manual_seed(columns)
    sizes = torch.randint(0, 40, (columns,), generator=generator).tolist()
    known = [torch.randperm(64, generator=generator)[:size] - 8 for size in sizes]
    ids = draw.integers(rows, columns, low=-10, high=60, dtype=draw.choice(ID_DTYPES))
    return Inputs((ids, *(tensor.to(draw.device) for tensor in vocabulary(known))))


@lru_cache(maxsize=12)
def _known(columns: int, size: int) -> tuple[Tensor, ...]:
    """Return the operator's tables of ``columns`` vocabularies of the ids below ``size``."""
    generator = torch.Generator().manual_seed(columns)
    return vocabulary([torch.randperm(size, generator=generator) for _ in range(columns)])


def space(draw: Draw) -> Inputs:
    """Draw the columns of a click log; of the ids a fifth are unknown."""
    rows, columns = draw.size(), draw.choice((1, 8, 26, 39))
    size = draw.choice((100, 3_000, 30_000))
    ids = draw.integers(rows, columns, low=0, high=size * 5 // 4, dtype=draw.choice(ID_DTYPES))
    return Inputs((ids, *(tensor.to(draw.device) for tensor in _known(columns, size))))
