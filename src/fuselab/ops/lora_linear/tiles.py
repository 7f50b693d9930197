"""How much a program of each kernel owns: the default rules, and what tuning may try instead."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.runtime.gpu_limits import multiprocessors, shared_bytes
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.tuning import Config, chosen

OP_NAME = "fuselab::lora_linear"

# Of the rank at a time; longer ones take several dots, or several programs.
RANK_BLOCK = 64
# Up to here S's gradient comes out of the pass that pulls back: its parts, float32 for every 128
# columns, are 17 % of that pass's bytes at rank 16 in bfloat16, written and read; a pass of its own
# would be 33 %.
FUSED_RANK = 32


def tile(
    rows: int,
    columns: int,
    inner: int,
    warps: int = 4,
    stages: int = 3,
    maps: int = 0,
    programs: int = 0,
) -> Config:
    """A tile of rows x columns of the output, ``inner`` of the operands at a time.

    ``group`` tiles of rows share a tile of columns in L2; ``stages`` tiles of operands are in
    shared memory at once. ``maps``: fetched by tensor maps (TMA), where the operands allow it.
    ``programs``: ``adapt`` takes the place of ``combine``, and in the forward of ``project``, with
    so many programs per multiprocessor, where tensor maps can read the operands.
    """
    return Config(
        rows=rows,
        columns=columns,
        inner=inner,
        group=8,
        warps=warps,
        stages=stages,
        maps=maps,
        programs=programs,
    )


# A 128 x 256 tile is 128 accumulator registers in 8 warps, and 48 KB of bfloat16 a stage. sm_90:
# 240 registers with pointers, 171 with tensor maps; gelu or silu on 128 spill 1.2 to 1.5 KB once.
# H200, 8192 x 4096 -> 4096: 1024 tiles in 7.8 rounds of 132.
_HALF = (
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
# ``adapt``, bfloat16. sm_90, Triton 3.6, relu at rank 16: 223 to 228 registers of 8 warps, 144 of
# 128 x 128 in 8, 227 of 4 warps; none spills, gelu spills 4 words on 128 x 256.
_ADAPT = (
    tile(128, 256, 64, 8, 3, maps=1, programs=1),
    tile(256, 128, 64, 8, 3, maps=1, programs=1),
    tile(128, 128, 64, 8, 4, maps=1, programs=1),
    tile(128, 128, 64, 4, 3, maps=1, programs=2),
)
# What the end of a tile takes beside the operands under way, by warps: as compiled 32.1 and 8.1 KB.
_ADAPT_END_BYTES = {8: 34 * 1024, 4: 10 * 1024}
# S costs adapt 1/8 of the product's time (16 of 256 columns, at half the tensor cores' rate) and
# ``project`` a read of input: at 790 TFLOP/s and 4.3 TB/s they meet at some 1,900 columns.
_ADAPT_COLUMNS = 2048
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
# A stream of the output: four 16-byte stores per thread in bfloat16.
_UPDATE = Config(rows=64, columns=128, warps=8)


def _reduction(rows: int, columns: int, warps: int, stages: int, programs: int = 4) -> Config:
    """A tile of ``pull_back_and_reduce``, and how many programs a multiprocessor gets at most."""
    return Config(rows=rows, columns=columns, warps=warps, stages=stages, programs=programs)


# sm_90, bfloat16, rank 16: 217 registers for relu, so two programs to a multiprocessor, 141 for
# gelu, of which 64 x 128 would spill 4.8 KB. Without anything to pull back, 56. Twice as many
# columns, or 8 warps, spill or halve what is under way.
_REDUCE = _reduction(64, 128, 4, 4)
_REDUCE_NARROW = _reduction(32, 64, 4, 4)


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


def product_tiles(input: Tensor, weight: Tensor, rank: int) -> Sequence[Config]:
    """Of ``combine`` with a product to compute. The default rule: the largest tile that fits shared
    memory and gives every multiprocessor one, no wider than the output."""
    return _product_tiles(
        (*input.shape, weight.shape[0]),
        power_of_two(rank, 16, RANK_BLOCK),
        input.dtype,
        _is_aligned(input) and _is_aligned(weight),
        input.dtype == torch.float32 and allows_tf32(),
        input.device,
    )


@cache
def _product_tiles(
    sizes: tuple[int, int, int],
    block_rank: int,
    dtype: torch.dtype,
    aligned: bool,
    tf32: bool,
    device: torch.device,
) -> Sequence[Config]:
    rows, inner, columns = sizes
    single = dtype == torch.float32
    table = (_TF32 if tf32 else _SINGLE) if single else _HALF

    def fits(config: Config) -> bool:
        # The operands under way, and the update's, which stay until its dot has ended.
        depth = config.stages * config.inner + block_rank
        needed = depth * (config.rows + config.columns) * dtype.itemsize
        small = aligned or config.rows * config.columns <= _UNALIGNED_TILE
        return small and needed <= shared_bytes(device)

    if not single and inner <= _SHORT_INNER:
        table = _HALF[1:]
    for default in [config for config in table if fits(config)] or [table[-1]]:
        wide = power_of_two(columns, 16, default.columns)
        if ceil_div(rows, default.rows) * ceil_div(columns, wide) >= multiprocessors(device):
            break
    maps = int(not single and aligned and 2 * rows * columns * inner >= _MAPS_FROM_FLOPS)
    found = [Config(**{**default, "columns": wide, "maps": maps})]
    if not single:
        # With maps where they can be: 171 registers for 240. Before sm_90 these are pointers.
        found += [
            Config(**{**tile(down, across, 64, 8, count, int(aligned)), "group": group})
            for down, across in ((128, 256), (256, 128), (128, 128))
            for group in (8, 16)
            for count in (3, 4)
        ]
    return tuple(config for config in dict.fromkeys(found) if fits(config)) or (found[0],)


def forward_tiles(input: Tensor, weight: Tensor, rank: int) -> Sequence[Config]:
    """Of the forward: ``combine``'s, and ``adapt``'s where S made again may cost less than its own
    launch."""
    if weight.shape[0] > _ADAPT_COLUMNS:
        return product_tiles(input, weight, rank)
    return backward_tiles(input, weight, rank)


def backward_tiles(input: Tensor, weight: Tensor, rank: int) -> Sequence[Config]:
    """Of the input's gradient, for which S's gradient is there: ``combine``'s and ``adapt``'s."""
    found = product_tiles(input, weight, rank)
    aligned = _is_aligned(input) and _is_aligned(weight)
    if input.dtype != torch.bfloat16 or rank > FUSED_RANK or not aligned:
        return found
    return (*found, *_adapt_tiles(power_of_two(rank, 16, FUSED_RANK), input.device))


@cache
def _adapt_tiles(block_rank: int, device: torch.device) -> Sequence[Config]:
    def fits(config: Config) -> bool:
        depth = 2 * config.stages * config.inner  # bytes of bfloat16
        needed = (
            depth * (config.rows + config.columns + block_rank) + _ADAPT_END_BYTES[config.warps]
        )
        return config.programs * needed <= shared_bytes(device)

    return tuple(
        Config(**{**config, "group": group})
        for config in _ADAPT
        if fits(config)
        for group in (8, 16)
    )


def product_tile(step: str, input: Tensor, weight: Tensor, rank: int) -> Config:
    """The tuned choice, else the default: per dtype, power of two of the rows, columns and K."""
    rows = power_of_two(input.shape[0])
    key = (input.dtype, rows, weight.shape[0], input.shape[1])
    candidates = forward_tiles if step == "triton" else backward_tiles
    return chosen(OP_NAME, step, key, candidates(input, weight, rank))


@cache
def update_tiles(columns: int) -> Sequence[Config]:
    """Of ``combine`` without a product: streams of the output."""
    found = [
        _UPDATE,
        *(
            Config(rows=rows, columns=across, warps=warps)
            for rows in (16, 32, 64, 128)
            for across in (64, 128, 256)
            for warps in (4, 8)
            if 2048 <= rows * across <= 16384
        ),
    ]
    return tuple(
        dict.fromkeys(
            Config(**{**config, "columns": power_of_two(columns, 16, config.columns)})
            for config in found
        )
    )


def update_tile(output: Tensor) -> Config:
    columns = output.shape[1]
    return chosen(OP_NAME, "triton_library", (output.dtype, columns), update_tiles(columns))


def default_reduction(upstream: Tensor, activation: str) -> Config:
    """Of ``pull_back_and_reduce``."""
    return reductions(upstream, activation)[0]


def reductions(upstream: Tensor, activation: str) -> Sequence[Config]:
    """Of ``pull_back_and_reduce``, the default rule's first."""
    from_preactivation = activation_named(activation).derivative_of == "preactivation"
    return _reductions(from_preactivation or not _is_aligned(upstream), upstream.element_size())


@cache
def _reductions(narrow: bool, itemsize: int) -> Sequence[Config]:
    default = _REDUCE_NARROW if narrow else _REDUCE
    found = [
        # As many bytes whatever the dtype.
        Config(**{**default, "columns": default.columns * 2 // itemsize}),
        *(
            _reduction(rows, columns, 4, count, programs)
            for rows, columns in ((32, 64), (64, 64), (32, 128), (64, 128))
            for count in (2, 4)
            for programs in (2, 4, 8)
        ),
    ]
    return tuple(dict.fromkeys(found))


def reduction(upstream: Tensor, activation: str, rank: int) -> Config:
    key = (upstream.dtype, activation, upstream.shape[1], power_of_two(rank, 16, 1024))
    return chosen(OP_NAME, "triton_library_backward", key, reductions(upstream, activation))
