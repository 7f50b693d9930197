"""The cases and draws of ``outer_interaction_linear``."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.activations import ACTIVATIONS


def _case(batch: int, tables: int, width: int, columns: int, activation: str, *tags: str) -> Case:
    """Build a case with weights as nn.Linear initialises them."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator) * 2 - 1

        elements = (tables + 1) * width
        tensors = (
            torch.randn(batch, width, generator=generator).relu(),
            uniform(batch, tables, width),
            uniform(columns, elements**2) / max(elements, 1),
            uniform(columns) / max(elements, 1),
        )
        return Inputs((*(tensor.to(device, dtype) for tensor in tensors), activation))

    return Case(f"{batch}x{tables}x{width}->{columns} {activation}", make, frozenset(tags))


CASES = (
    _case(64, 26, 16, 32, "relu", "bench"),
    _case(128, 26, 16, 512, "relu", "bench", "sweep", "huge"),
    _case(2048, 26, 16, 512, "relu", "bench", "sweep", "huge"),
    *(
        _case(batch, tables, width, columns, activation, "boundary")
        for batch, tables, width, columns, activation in (
            (0, 2, 3, 4, "relu"),
            (1, 0, 1, 1, "identity"),
            (3, 2, 0, 4, "relu"),
            (3, 2, 5, 0, "relu"),
            (5, 4, 3, 2, "relu"),
            (5, 1, 8, 3, "gelu"),
            (6, 0, 17, 5, "sigmoid"),
            (3, 1, 16, 3, "identity"),
            (3, 10, 3, 7, "leaky_relu"),
            # No activation with a kink where there are many outputs: about 34 of 42250
            # pre-activations in bfloat16 are so near 0 that their rounding decides the side.
            (65, 2, 4, 65, "tanh"),
            (1, 0, 16, 8, "identity"),
            (66, 2, 16, 72, "silu"),
        )
    ),
)


# Few, some and many samples (op.regime), with weights from 1.3 to 382 MB.
CPU_CASES = tuple(
    _case(batch, tables, 16, columns, "relu", *cpu_sizes.ROW)
    for tables, columns in ((8, 16), (26, 32), (26, 128), (26, 512))
    for batch in ((8, 64, 1024) if columns < 512 else (16, 100, 256))
)


def draw(draw: Draw) -> Inputs:
    """Draw few elements, because the weight grows with their square."""
    batch = draw.size(8, 16)
    tables = draw.choice((1, 0, 2, 3))
    width = draw.choice((2, 1, 3, 4))
    columns = draw.choice((2, 1, 3, 5, 8))
    elements = (tables + 1) * width
    return Inputs(
        (
            draw.tensor(batch, width),
            draw.tensor(batch, tables, width),
            draw.tensor(columns, elements**2),
            draw.choice((draw.tensor(columns), None)),
            draw.choice(tuple(ACTIVATIONS)),
        )
    )


def space(draw: Draw) -> Inputs:
    """Draw the tables, widths and layers of recommendation models; the batch grows."""
    batch, tables = draw.size(), draw.choice((26, 8, 3, 1))
    width, columns = draw.choice((16, 8, 4)), draw.choice((32, 8, 128, 512))
    elements = (tables + 1) * width
    weight = draw.tensor(columns, elements**2) / elements
    return Inputs(
        (
            draw.tensor(batch, width),
            draw.tensor(batch, tables, width),
            weight,
            draw.choice((draw.tensor(columns), None)),
            draw.choice(tuple(ACTIVATIONS)),
        )
    )
