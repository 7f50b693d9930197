"""The cases and draws of ``linear_sigmoid``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.cases import (
    BOUNDARY,
    MATRIX_LAYOUTS,
    Random,
    made,
    sweep_tags,
    unchanged,
)

# BENCH: DLRM's last layer at its batch sizes, and wider ones. _EDGES: sizes around packs of 4 and 8
# elements, a warp's 32 packs, the tiles' 1024 columns, the groups of 4 and 16 rows.
BENCH = ((128, 256), (2048, 256), (65536, 256), (65536, 64), (65536, 1024), (16384, 4096))


_EDGES = (
    *((0, 8), (3, 0), (1, 1), (5, 1), (1, 3), (4, 7), (16, 8), (17, 9), (33, 31), (64, 33)),
    *((3, 255), (31, 256), (9, 257), (2, 1023), (5, 1024), (7, 1025), (1, 2100)),
)


def linear_arguments(
    random: Random,
    shape: Sequence[int],
    bias: bool = True,
    lay_out: Callable[[Tensor], Tensor] = unchanged,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return a standard normal input, a weight that gives logits of about 2, and a bias or none."""
    input = lay_out(random.normal(*shape))
    depth = input.shape[-1]
    weight = random.normal(1, depth, deviation=2 * max(depth, 1) ** -0.5)
    return input, weight, random.normal(1) if bias else None


@made
def _case(random: Random, /, shape: Sequence[int], **options: Any) -> Inputs:
    return Inputs(linear_arguments(random, shape, **options))


def case_tags() -> Iterator[tuple[str, tuple[int, ...], dict[str, Any], frozenset[str]]]:
    """Yield name, shape, options of ``linear_arguments`` and tags of every case."""
    for rows, depth in BENCH:
        tags = sweep_tags(tiny=rows == 128)
        yield f"{rows}x{depth}", (rows, depth), {}, tags
    for rows, depth in _EDGES:
        yield f"boundary_{rows}x{depth}", (rows, depth), {}, BOUNDARY
    yield "no_bias", (33, 40), {"bias": False}, BOUNDARY
    yield "1d", (40,), {}, BOUNDARY
    yield "4d", (2, 3, 5, 40), {}, BOUNDARY
    for name, lay_out in MATRIX_LAYOUTS.items():
        yield f"layout_{name}", (48, 48), {"lay_out": lay_out}, BOUNDARY


# (rows, depth) of float32 inputs, 64 kB to 200 MB; then those that are timed in every dtype.
CPU_SHAPES = (
    *((64, 256), (1000, 33), (127, 1025), (2048, 256), (20000, 65), (16384, 256), (4096, 1025)),
    *((8192, 1024), (200_000, 64), (16384, 1500), (65536, 511), (50000, 1000)),
)


CPU_SHAPES_IN_EVERY_DTYPE = ((2, 8), (64, 64), (1000, 13), (4096, 255), (16384, 512))


def draw_linear(source: Draw) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw any shape and layout, a bias or none."""
    leading = [source.size(1, 4, 17) for _ in range(source.choice((1, 0, 2)))]
    depth = source.size(1, 8, 33, 256, 257)
    bias = source.tensor(1) if source.choice((True, False)) else None
    return source.tensor(*leading, depth), source.tensor(1, depth), bias


def draw(source: Draw) -> Inputs:
    return Inputs(draw_linear(source))


CASES = tuple(
    Case(name, _case(shape, **options), tags) for name, shape, options, tags in case_tags()
)
CPU_CASES = (
    *(Case(f"{m}x{k}", _case((m, k)), cpu_sizes.ROW) for m, k in CPU_SHAPES),
    *(Case(f"{m}x{k}", _case((m, k)), cpu_sizes.DTYPES) for m, k in CPU_SHAPES_IN_EVERY_DTYPE),
)
