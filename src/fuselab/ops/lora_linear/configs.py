"""How much a program of each Triton kernel owns."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.tuning import Config

# Of the rank at a time; longer ones take several dots, or several programs.
RANK_BLOCK = 64
# Up to here S's gradient comes out of the pass that pulls back: its parts, float32 for every 128
# columns, are 17 % of that pass's bytes at rank 16 in bfloat16, written and read; a pass of its own
# would be 33 %.
FUSED_RANK = 32
# Tiles of rows that share a tile of columns in L2. 16 of them: within 1 % (H200, 2026-11-21).
GROUP = 8


def tile(
    rows: int, columns: int, inner: int, warps: int = 4, stages: int = 3, maps: int = 0
) -> Config:
    """A tile of rows x columns of the output, ``inner`` of the operands at a time.

    ``stages`` tiles of operands are in shared memory at once. ``maps``: fetched by tensor maps
    (TMA), where the operands allow it.
    """
    return Config(rows=rows, columns=columns, inner=inner, warps=warps, stages=stages, maps=maps)


# A 128 x 256 tile is 128 accumulator registers in 8 warps, and 48 KB of bfloat16 a stage. sm_90:
# 240 registers with pointers, 171 with tensor maps; gelu or silu on 128 spill 1.2 to 1.5 KB once.
# H200, 8192 x 4096 -> 4096: 1024 tiles in 7.8 rounds of 132.
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
# Operands that ``_is_aligned`` says no of arrive element by element, through registers:
# 128 x 128 then spills 36 words, 64 x 128 none.
_UNALIGNED_TILE = 64 * 128
# Encoding tensor maps costs some 10 us of host time per launch. us with pointers / maps (H200,
# bfloat16, 2026-11-21): 4096 x 1024 -> 1024 29.9 / 25.4, 65536 x 512 -> 512 125 / 113, and 104 on
# tiles of 128 x 128: 8 steps along the inner dimension fill a pipeline of wider ones too seldom.
_MAPS_FROM_FLOPS = 2**33
_SHORT_INNER = 512
PROJECT_INNER_BYTES = 256  # of a row of input at a time: two whole lines
# Of ``sum_parts``: all parts in one go where there are 128 or fewer, and programs as small as that
# leaves them. 16 parts of 256 elements took 17.3 us for 132 parts of 4096 elements, 11.5 for 64 of
# 16384 (H200, 2026-11-21): nine and four reads, each waiting for the one before, of few programs.
SUMMED_PARTS, SUMMED_NUMBERS, SUMMED_ELEMENTS = 128, 4096, 256
# Of ``pull_back_and_reduce``; a multiprocessor gets ``programs`` at most. sm_90, bfloat16, rank 16:
# 217 registers for relu, so two programs to a multiprocessor, 141 for gelu, of which 64 x 128 would
# spill 4.8 KB. Without anything to pull back, 56. Twice as many columns, or 8 warps, spill or halve
# what is under way.
_REDUCE = Config(rows=64, columns=128, warps=4, stages=4, programs=4)
_REDUCE_NARROW = Config(rows=32, columns=64, warps=4, stages=4, programs=4)


def stages(operand: Tensor, most: int, elements: int) -> int:
    """How many tiles of that many elements, ``most`` at most, fit into shared memory together."""
    tile_bytes = elements * operand.element_size()
    return max(1, min(most, shared_bytes(operand.device) // tile_bytes))


def _is_aligned(matrix: Tensor) -> bool:
    """Whether loads are 16 bytes wide: contiguous along a row or a column, and that in multiples of
    16 elements, which is what Triton knows of a size that masks them."""
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
        # The operands under way, and the update's, which stay until its dot has ended.
        depth = config.stages * config.inner + block_rank
        needed = depth * (config.rows + config.columns) * dtype.itemsize
        small = aligned or config.rows * config.columns <= _UNALIGNED_TILE
        return small and needed <= shared_bytes(device)

    if not single and inner <= _SHORT_INNER:
        table = HALF[1:]
    for found in [config for config in table if fits(config)] or [table[-1]]:
        wide = power_of_two(columns, 16, found.columns)
        if ceil_div(rows, found.rows) * ceil_div(columns, wide) >= multiprocessors(device):
            break
    maps = int(not single and aligned and 2 * rows * columns * inner >= _MAPS_FROM_FLOPS)
    return Config(**{**found, "columns": wide, "maps": maps})


def reduction(upstream: Tensor, activation: str) -> Config:
    """Return the tile of ``pull_back_and_reduce``: as many bytes whatever the dtype."""
    from_preactivation = activation_named(activation).derivative_of == "preactivation"
    default = _REDUCE_NARROW if from_preactivation or not _is_aligned(upstream) else _REDUCE
    return Config(**{**default, "columns": default.columns * 2 // upstream.element_size()})
