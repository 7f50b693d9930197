"""The cases and draws of ``cat_interaction``."""

from __future__ import annotations

from dataclasses import replace

from fuselab.op import Case, Draw, Inputs, sized


def _case(batch: int, tables: int, width: int, *tags: str) -> Case:
    shape = (batch, tables, width)
    return replace(Case.normal(((batch, width), shape), *tags), name=sized(shape))


CASES = (
    _case(2048, 26, 16, "bench", "sweep"),
    _case(65536, 26, 16, "bench", "sweep"),
    *(
        _case(batch, tables, width, "boundary")
        for batch, tables, width in (
            (0, 3, 4),
            (1, 1, 1),
            (3, 0, 5),
            (3, 2, 0),
            (7, 26, 16),
            (8, 3, 128),
            (9, 3, 129),
        )
    ),
)


def draw(draw: Draw) -> Inputs:
    batch, tables, width = draw.size(8), draw.size(26), draw.size(16)
    return Inputs((draw.tensor(batch, width), draw.tensor(batch, tables, width)))


def space(draw: Draw) -> Inputs:
    """Draw the tables and widths of recommendation models; the batch grows."""
    batch, tables = draw.size(), draw.choice((26, 8, 13, 1, 40))
    width = draw.choice((16, 32, 64, 128, 10, 33))
    return Inputs((draw.tensor(batch, width), draw.tensor(batch, tables, width)))
