"""The cases and draws of ``dot_interaction``."""

from __future__ import annotations

import torch

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes


def _case(batch: int, tables: int, width: int, padding: int, *tags: str) -> Case:
    """Build uniform, small embeddings as DLRM initialises them, and a dense vector after a ReLU."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        dense = torch.randn(batch, width, generator=generator).relu()
        embeddings = torch.rand(batch, tables, width, generator=generator) - 0.5
        return Inputs((dense.to(device, dtype), embeddings.to(device, dtype), padding))

    return Case(f"{batch}x{tables}x{width}", make, frozenset(tags))


CPU_CASES = (
    *(
        _case(batch, tables, width, 0, *cpu_sizes.ROW)
        for batch, tables, width in (
            (20, 26, 16),
            (128, 26, 16),
            (777, 7, 33),
            (2048, 8, 64),
            (2048, 26, 16),
            (4096, 26, 16),
            (3001, 13, 49),
            (1024, 26, 128),
            (16384, 26, 16),
            (30000, 26, 16),
            (8192, 26, 128),
            (60000, 26, 16),
        )
    ),
    *(
        _case(batch, tables, width, 0, *cpu_sizes.DTYPES)
        for batch, tables, width in ((1, 2, 3), (4, 26, 16), (128, 26, 16), (2048, 26, 16))
    ),
)


CASES = (
    _case(128, 26, 16, 0, "bench", "sweep"),
    _case(2048, 26, 16, 0, "bench", "sweep"),
    _case(16384, 26, 16, 0, "bench", "sweep"),
    _case(65536, 26, 16, 0, "bench", "sweep"),
    _case(16384, 26, 128, 1, "bench"),
    *(
        _case(batch, tables, width, padding, "boundary")
        for batch, tables, width, padding in (
            (0, 26, 16, 0),
            (1, 1, 1, 0),
            (3, 0, 5, 2),
            (3, 2, 0, 1),
            (9, 26, 16, 1),
            (7, 15, 16, 0),
            (5, 16, 17, 0),
            (5, 3, 15, 0),
            (31, 8, 16, 0),
            (5, 31, 16, 0),
            (4, 32, 33, 3),
            (2, 63, 64, 0),
            (2, 64, 65, 0),
        )
    ),
)


def draw(draw: Draw) -> Inputs:
    """Draw few tables, because the pairs grow with their square."""
    batch = draw.size(8, 16)
    tables = draw.choice((2, 1, 0, 3, 4, 7, 8, 15, 16, 26))
    width = draw.choice((4, 1, 2, 3, 5, 8, 15, 16, 17, 32))
    padding = draw.choice((0, 1, 3))
    return Inputs((draw.tensor(batch, width), draw.tensor(batch, tables, width), padding))


def space(draw: Draw) -> Inputs:
    """Draw the tables and widths of recommendation models; the batch grows."""
    batch, tables = draw.size(), draw.choice((26, 8, 13, 1, 40))
    width = draw.choice((16, 32, 64, 128, 10, 33))
    padding = draw.choice((0, 0, 1))
    return Inputs((draw.tensor(batch, width), draw.tensor(batch, tables, width), padding))
