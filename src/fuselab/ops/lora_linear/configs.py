"""The tile sizes of the Triton kernels."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.tuning import Config

# The ranks that a dot takes; a longer rank takes several dots, or several programs.
RANK_BLOCK = 64
# Up to this rank S's gradient comes out of the pass that pulls back. Its float32 parts, one for
# every 128 columns, are 17 % of that pass's bytes at rank 16 in bfloat16, written and read; a
# separate pass would be 33 %.
FUSED_RANK = 32
# Tiles of rows that share a tile of columns in L2; 16 of them are within 1 % (H200).
GROUP = 8


def tile(
    rows: int, columns: int, inner: int, warps: int = 4, stages: int = 3, maps: int = 0
) -> Config:
    """Return a tile of rows x columns of the output, with ``inner`` of the operands per step.

    ``stages`` steps of the operands are in shared memory at once. ``maps``: operands are loaded by
    tensor maps (TMA) where they allow it.
    """
    return Config(rows=rows, columns=columns, inner=inner, warps=warps, stages=stages, maps=maps)


# A 128 x 256 tile needs 128 accumulator registers per thread in 8 warps, and 48 KB of bfloat16 per
# stage. On sm_90 it takes 240 registers with pointers and 171 with tensor maps.
HALF = (
    tile(128, 256, 64, warps=8),
    tile(128, 128, 64, warps=8),
    tile(64, 128, 64, warps=8),
    tile(64, 64, 64, stages=4),
    tile(16, 64, 64, stages=4),
)
_TF32 = (
    tile(128, 128, 32, warps=8),
    tile(64, 128, 32, warps=8),
    tile(64, 64, 32),
    tile(16, 64, 32),
)
# Without tensor cores: FMAs out of shared memory.
_SINGLE = (tile(64, 64, 16, warps=8), tile(32, 64, 16), tile(16, 32, 16))
# Operands that fail ``_is_aligned`` are loaded element by element through registers: a 128 x 128
# tile then spills 36 words, a 64 x 128 tile none.
_UNALIGNED_TILE = 64 * 128
# Encoding tensor maps costs about 10 us of host time per launch, so they pay from this many FLOPs
# on. With a short inner dimension, narrower tiles are faster (65536 x 512 -> 512: 104 us for 113 on
# an H200), because 8 steps do not keep the pipeline of a wide tile full.
_MAPS_FROM_FLOPS = 2**33
_SHORT_INNER = 512
PROJECT_INNER_BYTES = 256  # of an input row per step: two whole cache lines
# Sizes of ``sum_parts``: all parts in one step if there are at most 128, and programs so small that
# many run at once. Several steps, each waiting for the one before, were slower.
SUMMED_PARTS, SUMMED_NUMBERS, SUMMED_ELEMENTS = 128, 4096, 256
# Tiles of ``pull_back_and_reduce``; a multiprocessor gets ``programs`` at most. Registers decide
# the size: bfloat16 at rank 16 on sm_90 takes 217 for relu, so two programs fit. gelu takes 141
# with the narrow tile, and would spill 4.8 KB with the wide one.
_REDUCE = Config(rows=64, columns=128, warps=4, stages=4, programs=4)
_REDUCE_NARROW = Config(rows=32, columns=64, warps=4, stages=4, programs=4)


def stages(operand: Tensor, most: int, elements: int) -> int:
    """Return how many tiles of ``elements`` elements fit into shared memory, at most ``most``."""
    tile_bytes = elements * operand.element_size()
    return max(1, min(most, shared_bytes(operand.device) // tile_bytes))


def _is_aligned(matrix: Tensor) -> bool:
    """Return whether loads are 16 bytes wide: contiguous along a row or a column, in multiples of
    16 elements, which is the divisor that Triton tests of a size in a mask."""
    if matrix.stride(1) != 1:
        matrix = matrix.t()
    row, column = matrix.stride()
    whole = row * matrix.element_size() % 16 == 0 and matrix.shape[1] % 16 == 0
    return column == 1 and whole and matrix.data_ptr() % 16 == 0


def product_tile(input: Tensor, weight: Tensor, rank: int) -> Config:
    """Return the tile of ``combine``: the largest that fits shared memory and gives every
    multiprocessor one, no wider than the output."""
    return _product_tile(
        (*input.shape, weight.shape[0]),
        power_of_two(rank, 16, RANK_BLOCK),
        input.dtype,
        _is_aligned(input) and _is_aligned(weight),
        input.dtype == torch.float32 and allows_tf32(),
        input.device,
    )


@cache
def _product_tile(
    sizes: tuple[int, int, int],
    block_rank: int,
    dtype: torch.dtype,
    aligned: bool,
    tf32: bool,
    device: torch.device,
) -> Config:
    rows, inner, columns = sizes
    single = dtype == torch.float32
    table = (_TF32 if tf32 else _SINGLE) if single else HALF

    def fits(config: Config) -> bool:
        # The operands in flight, and the update's operands, which are held until its dot has ended.
        depth = config.stages * config.inner + block_rank
        needed = depth * (config.rows + config.columns) * dtype.itemsize
        small = aligned or config.rows * config.columns <= _UNALIGNED_TILE
        return bool(small and needed <= shared_bytes(device))

    if not single and inner <= _SHORT_INNER:
        table = HALF[1:]
    for found in [config for config in table if fits(config)] or [table[-1]]:
        wide = power_of_two(columns, 16, found.columns)
        if ceil_div(rows, found.rows) * ceil_div(columns, wide) >= multiprocessors(device):
            break
    maps = int(not single and aligned and 2 * rows * columns * inner >= _MAPS_FROM_FLOPS)
    return Config(**{**found, "columns": wide, "maps": maps})


def reduction(upstream: Tensor, activation: str) -> Config:
    """Return the tile of ``pull_back_and_reduce``, with the same bytes for every dtype."""
    from_preactivation = activation_named(activation).derivative_of == "preactivation"
    default = _REDUCE_NARROW if from_preactivation or not _is_aligned(upstream) else _REDUCE
    return Config(**{**default, "columns": default.columns * 2 // upstream.element_size()})
