"""The tile sizes of the Triton kernels: the default rule first, then what tuning may try.

A tile is a ``Config`` of ``rows`` x ``columns`` of the output, computed by ``warps`` warps. For the
deep kernel it also has ``depth``, the operands' depth per step, ``stages``, the steps held in
shared memory, and ``group``, the tiles of rows that share a tile of columns in L2. The shallow
kernels take the whole depth at once, and ``programs`` per multiprocessor share the tiles.
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

# Up to this depth a product with many rows is limited by writing its output, not by arithmetic. The
# shallow kernels hold all weights of a column in registers.
SHALLOW_DEPTH = 32


def _deep(rows: int, columns: int, depth: int, warps: int, stages: int, group: int = 8) -> Config:
    return Config(rows=rows, columns=columns, depth=depth, group=group, warps=warps, stages=stages)


# Largest first: smaller tiles keep all multiprocessors busy where the larger ones are too few. The
# registers suffice on sm_80 and sm_90: of relu's kernels only 128 x 256 on sm_80 spills, 10 words.
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
# More tiles for tuning to time on large 16-bit products.
_MORE = tuple(
    _deep(rows, columns, depth, 4 if rows * columns < 16384 else 8, stages, group)
    for (rows, columns), depth, stages, group in product(
        ((128, 256), (256, 128), (128, 128), (64, 256), (128, 64)), (64, 128), (3, 4), (4, 8, 16)
    )
)
# Operands whose rows are not multiples of 16 bytes are loaded element by element through registers.
# A 128 x 256 tile then spills 392 words, a 64 x 128 tile in 8 warps none.
_UNALIGNED_TILE = 64 * 128

# Registers limit the programs per multiprocessor: a bfloat16 tile of 64 x 128 takes 160 forward (3
# programs), one of 64 x 64 takes 85, and 43 KB of shared memory, backward (5 programs).
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
    """Return the candidate tiles for ``x`` (rows, depth) and ``weight`` (columns, depth)."""
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
    """Return the rows rounded up to a power of two, the columns and the depth."""
    return power_of_two(x.shape[0]), weight.shape[0], x.shape[1]


def _has_whole_vectors(operand: Tensor) -> bool:
    """Return whether the operand can be loaded 16 bytes at a time along one dimension."""
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
    """Return the candidates of the deep kernel. The first one is the largest tile of the table that
    fits shared memory and gives every multiprocessor a tile, or the smallest if none does."""
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
    """Clip the tiles to the output's size, drop duplicates, and use at least ``warps`` warps."""
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
    """Return the bytes of shared memory that the deep kernel's operands take."""
    return int(tile.stages * tile.depth * (tile.rows + tile.columns) * dtype.itemsize)
