"""How large the Triton kernels' tiles are: the default rule first, then what tuning may try.

A tile is a ``Config`` of ``rows`` x ``columns`` of the output in ``warps`` warps. The deep kernel
also has ``depth`` of the operands at a time, ``stages`` of them in shared memory, and ``group``
tiles of rows that share a tile of columns in L2; the shallow ones take the whole depth, and
``programs`` per multiprocessor share the tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.tuning import Config

# Up to this depth a product with many rows is a stream of output, not arithmetic: the shallow
# kernels hold all of a column's weights in registers.
SHALLOW_DEPTH = 32


def _deep(rows: int, columns: int, depth: int, warps: int, stages: int, group: int = 8) -> Config:
    return Config(rows=rows, columns=columns, depth=depth, group=group, warps=warps, stages=stages)


# Largest first: smaller tiles keep all multiprocessors busy where the larger ones are too few.
# Registers in bfloat16 for sm_90 / sm_80, Triton 3.7.1: 128 x 256 183 / 255, 128 x 128 108 / 176,
# 64 x 128 117 / 180; HGMMA on sm_90 and UTCHMMA on sm_100, loads LDGSTS.128, stores STG.128. Of
# relu nothing spills but 10 words at 128 x 256 on sm_80; gelu there spills 13 on sm_90.
_HALF = (
    _deep(128, 256, 64, warps=8, stages=3),
    _deep(128, 128, 64, warps=8, stages=3),
    _deep(64, 128, 64, warps=4, stages=3),
    _deep(64, 64, 64, warps=4, stages=4),
    _deep(32, 64, 64, warps=4, stages=4),
    _deep(16, 64, 64, warps=4, stages=4),
)
_TF32 = (
    _deep(128, 128, 32, warps=8, stages=3),
    _deep(64, 128, 32, warps=4, stages=3),
    _deep(64, 64, 32, warps=4, stages=3),
    _deep(32, 64, 32, warps=4, stages=3),
    _deep(16, 64, 32, warps=4, stages=3),
)
# Without tensor cores: FMAs out of shared memory.
_SINGLE = (
    _deep(64, 64, 16, warps=8, stages=3),
    _deep(32, 64, 16, warps=4, stages=3),
    _deep(16, 32, 16, warps=4, stages=3),
)
# What else is worth timing for large 16-bit products.
_MORE = tuple(
    _deep(rows, columns, depth, 4 if rows * columns < 16384 else 8, stages, group)
    for (rows, columns), depth, stages, group in product(
        ((128, 256), (256, 128), (128, 128), (64, 256), (128, 64)), (64, 128), (3, 4), (4, 8, 16)
    )
)
# Operands whose rows are not multiples of 16 bytes arrive element by element, through registers:
# a 128 x 256 tile then spills 392 words, a 64 x 128 tile in 8 warps none.
_UNALIGNED_TILE = 64 * 128

# In bfloat16 a 64 x 128 tile takes 160 registers forward (3 programs per multiprocessor), a 64 x 64
# tile 85 and 43 KB backward (5).
_SHALLOW = tuple(
    Config(rows=rows, columns=columns, warps=warps, programs=programs)
    for rows, columns, warps, programs in (
        (64, 128, 4, 6),
        *product((32, 64, 128), (64, 128, 256), (4, 8), (4, 6, 12)),
    )
    if rows * columns <= 16384
)
_SHALLOW_BACKWARD = tuple(
    Config(rows=rows, columns=columns, warps=warps, programs=programs)
    for rows, columns, warps, programs in (
        (64, 64, 4, 5),
        *product((32, 64, 128), (64, 128), (4, 8), (2, 4, 5, 8)),
    )
    if rows * columns <= 8192
)


def forward_tiles(x: Tensor, weight: Tensor) -> Sequence[Config]:
    """For a matrix ``x`` (rows, depth) and ``weight`` (columns, depth)."""
    rows, depth = x.shape
    columns = weight.shape[0]
    if depth <= SHALLOW_DEPTH:
        return _clipped(_SHALLOW, rows, columns)
    aligned = all(_has_whole_vectors(operand) for operand in (x, weight))
    uses_tf32 = x.dtype == torch.float32 and allows_tf32()
    return _deep_tiles(rows, columns, x.dtype, uses_tf32, aligned, x.device)


def backward_tiles(rows: int, columns: int) -> Sequence[Config]:
    """Return the tiles of the shallow backward, the default first."""
    return _clipped(_SHALLOW_BACKWARD, rows, columns)


def key(x: Tensor, weight: Tensor) -> tuple[object, ...]:
    """Return the key of the best tile: the arithmetic and the sizes."""
    return "tf32" if x.dtype == torch.float32 and allows_tf32() else x.dtype, *sizes(x, weight)


def sizes(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Rows to the next power of two, columns and depth."""
    return power_of_two(x.shape[0]), weight.shape[0], x.shape[1]


def _has_whole_vectors(operand: Tensor) -> bool:
    """Whether 16 bytes at a time can be loaded along one dimension."""
    strides = operand.stride()
    return (
        operand.data_ptr() % 16 == 0
        and 1 in strides
        and all(stride == 1 or stride * operand.element_size() % 16 == 0 for stride in strides)
    )


@lru_cache(maxsize=1024)
def _deep_tiles(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    uses_tf32: bool,
    aligned: bool,
    device: torch.device,
) -> Sequence[Config]:
    """First the largest tile of the table that fits shared memory and gives every multiprocessor
    one, else the smallest."""
    table = _HALF if dtype != torch.float32 else _TF32 if uses_tf32 else _SINGLE

    def fits(tile: Config) -> bool:
        return shared_of(tile, dtype) <= shared_bytes(device) and (
            aligned or tile.rows * tile.columns <= _UNALIGNED_TILE
        )

    def fills(tile: Config) -> bool:
        across = power_of_two(columns, 16, tile.columns)
        return ceil_div(rows, tile.rows) * ceil_div(columns, across) >= multiprocessors(device)

    fitting = [tile for tile in table if fits(tile)]
    first = next((tile for tile in fitting if fills(tile)), fitting[-1])
    more = filter(fits, _MORE) if dtype != torch.float32 else ()
    return _clipped((first, *fitting, *more), rows, columns, 1 if aligned else 8)


def _clipped(tiles: Sequence[Config], rows: int, columns: int, warps: int = 1) -> Sequence[Config]:
    """No tile wider than the output, none twice, and each in at least ``warps`` warps."""
    return tuple(
        dict.fromkeys(
            Config(
                **{
                    **tile,
                    "rows": power_of_two(rows, 16, tile.rows),
                    "columns": power_of_two(columns, 16, tile.columns),
                    "warps": max(tile.warps, warps),
                }
            )
            for tile in tiles
        )
    )


def shared_of(tile: Config, dtype: torch.dtype) -> int:
    """Bytes of shared memory that the deep kernel's operands take."""
    return int(tile.stages * tile.depth * (tile.rows + tile.columns) * dtype.itemsize)
