"""The cases and draws of ``softmax`` and ``log_softmax``."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes


def _case(
    shape: Sequence[int],
    *tags: str,
    dim: int = -1,
    mean: float = 0.0,
    name: str = "",
) -> Case:
    """Return a case of normal values around ``mean``."""

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        values = torch.randn(tuple(shape), generator=generator) + mean
        return Inputs((values.to(device, dtype),), {"dim": dim})

    size = "x".join(map(str, shape)) or "scalar"
    return Case(name or (size if dim == -1 else f"{size} dim {dim}"), make, frozenset(tags))


def _masked(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    """Build scores under attention's causal mask: -inf above the diagonal."""
    scores = torch.randn((4, 65, 65), generator=generator)
    future = torch.ones(65, 65, dtype=torch.bool).triu(1)
    return Inputs((scores.masked_fill(future, -math.inf).to(device, dtype),))


def _cpu_cases() -> Iterator[Case]:
    for shape in cpu_sizes.MATRICES:
        yield _case(shape, *cpu_sizes.ROW)
    for width in (5, 10, 24, 64, 257, 4099):
        for elements in (2**8, 2**12, 2**16, 2**20):
            yield _case((max(elements // width, 1), width), *cpu_sizes.DTYPES)
    yield _case((8, 300_001), *cpu_sizes.DTYPES)
    for outer, width, inner in ((1, 16, 16), (1, 100, 64), (8, 19, 1024), (1, 1024, 4096)):
        yield _case((outer, width, inner), *cpu_sizes.DTYPES, dim=1)
    for outer, width, inner in ((2, 5, 3), (64, 100, 3), (64, 1000, 7)):
        yield _case((outer, width, inner), *cpu_sizes.DTYPES, dim=1)


CASES = (
    _case((4, 4), "bench", "sweep", "tiny"),
    _case((4096, 128), "bench", "sweep"),
    _case((4096, 1024), "bench", "sweep"),
    _case((4096, 4096), "bench", "sweep"),
    _case((4096, 16384), "bench", "sweep"),
    _case((2048, 65536), "bench", "sweep"),
    _case((1024, 262144), "bench", "sweep"),
    _case((64, 1_000_000), "bench", "sweep"),
    _case((32, 19, 128, 128), "bench", dim=1),
    *(
        _case((3, width), "boundary")
        for width in (1, 2, 3, 15, 16, 17, 31, 33, 255, 256, 257, 1023, 1025, 4095, 4097, 16385)
    ),
    # On an H200 the first row needs a cluster, and the second is split into pieces.
    _case((3, 70_000), "boundary"),
    _case((2, 300_000), "boundary"),
    _case((), "boundary"),
    _case((0, 3), "boundary"),
    _case((3, 0), "boundary"),
    # A kernel that takes the maximum before it masks padded lanes sums such a row to 0.
    _case((5, 100), "boundary", mean=-200.0, name="5x100 around -200"),
    Case("causal mask", _masked, frozenset({"boundary"})),
    _case((2, 3, 5, 7), "boundary", dim=1),
    _case((70, 33), "boundary", dim=0),
    _case((5, 2, 3), "boundary", dim=1),
    _case((2, 1_000_000), "boundary", "huge"),
    _case((3, 2000, 40), "boundary", "huge", dim=1),
)


CPU_CASES = tuple(_cpu_cases())


def draw(draw: Draw) -> Inputs:
    """Draw one to four dimensions; the reduced one has sizes around the tables' edges."""
    ndim = draw.choice((2, 1, 3, 4))
    dim = draw.choice((-1, *range(-ndim, ndim)))
    shape = [
        draw.size(1024, 2048, 4096) if place == dim % ndim else draw.size() for place in range(ndim)
    ]
    return Inputs((draw.tensor(*shape),), {"dim": dim})
