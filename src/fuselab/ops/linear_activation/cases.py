"""The cases and draws of ``linear_activation``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.cases import (
    BOUNDARY,
    MATRIX_LAYOUTS,
    Random,
    made,
    sweep_tags,
    unchanged,
)


@made
def _case(
    random: Random,
    shape: Sequence[int],
    columns: int,
    activation: str = "relu",
    bias: bool = True,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
) -> Inputs:
    """Build standard normal inputs, and weights scaled as nn.Linear initialises them. ``lay_out``
    is applied to the input and to the weight."""
    input = lay_out(random.normal(*shape))
    depth = shape[-1]
    weight = lay_out(random.normal(columns, depth, deviation=max(depth, 1) ** -0.5))
    vector = random.normal(weight.shape[0]) if bias else None
    return Inputs((input, weight, vector, activation))


_BENCH = (
    (16, 16, 16),
    (65536, 13, 512),
    (65536, 512, 256),
    (65536, 256, 64),
    (16384, 1024, 1024),
    (4096, 4096, 4096),
)


# Sizes around the edges of the tiles (16 to 128 rows, 32 to 256 columns, 16 to 64 deep), of a store
# (8 columns) and of the shallow kernels (16 and 32 deep).
_BOUNDARY = (
    (0, 3, 4),
    (3, 0, 4),
    (3, 4, 0),
    (1, 1, 1),
    (2, 3, 1),
    (3, 2, 9),
    (15, 13, 33),
    (17, 16, 8),
    (129, 17, 40),
    (64, 32, 127),
    (65, 33, 129),
    (5, 64, 16),
    (16, 65, 257),
    (130, 129, 64),
)


def _cases() -> Iterator[Case]:
    for rows, depth, columns in _BENCH:
        tags = sweep_tags(tiny=rows == 16)
        name = f"{rows}x{depth}->{columns}"
        yield Case(name, _case((rows, depth), columns), tags)
    for rows, depth, columns in _BOUNDARY:
        name = f"boundary_{rows}x{depth}->{columns}"
        yield Case(name, _case((rows, depth), columns), BOUNDARY)
    for name in ACTIVATIONS:
        yield Case(f"{name}_37x13->65", _case((37, 13), 65, name), BOUNDARY)
        yield Case(f"{name}_37x40->65", _case((37, 40), 65, name), BOUNDARY)
    yield Case("no_bias", _case((33, 40), 24, bias=False), BOUNDARY)
    yield Case("1d", _case((40,), 24), BOUNDARY)
    yield Case("4d", _case((2, 3, 5, 40), 24), BOUNDARY)
    for name, lay_out in MATRIX_LAYOUTS.items():
        yield Case(f"layout_{name}", _case((48, 48), 48, lay_out=lay_out), BOUNDARY)


def draw(source: Draw) -> Inputs:
    """Draw any shape and layout, any activation, a bias or none."""
    leading = [source.size(1, 16, 65) for _ in range(source.choice((1, 0, 2)))]
    depth = source.size(1, 13, 16, 17, 32, 33, 64)
    columns = source.size(1, 3, 8, 64, 129)
    input, weight = source.tensor(*leading, depth), source.tensor(columns, depth)
    bias = source.tensor(columns) if source.choice((True, False)) else None
    return Inputs((input, weight, bias, source.choice(tuple(ACTIVATIONS))))


CASES = tuple(_cases())
