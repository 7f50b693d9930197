"""Launch grids of pointwise kernels: packs and blocks in CUDA C++, tiles in Triton."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import cuda_types
from fuselab.ops._shared.layout import MAX_RANK, Nest, nest
from fuselab.ops._shared.packs import is_aligned, pack_width
from fuselab.ops._shared.template_arguments import flags, index_type, numbers
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import i64
from fuselab.runtime.triton_launch import launch

THREADS = 256  # per CUDA block; `threads` of cuda_nest.h
TRITON_BLOCK_BYTES = 4096  # output bytes of a flat tile: two 16-byte stores per thread of 4 warps
TRITON_TILE = 1024  # elements in a tile of the strided kernels


def launch_by_packs(
    source: CudaSource,
    kernel: str,
    loops: Nest,
    dtypes: Sequence[torch.dtype],
    operands: Sequence[Tensor],
    output: Tensor,
) -> None:
    """Launch ``kernel<types, Index, rank, width, packed...>(operands..., output, numel, nest)``.

    A thread owns one pack of consecutive elements of ``output``, all within one row of the nest.
    """
    rank, row = len(loops.sizes), loops.sizes[-1]
    width = pack_width(*dtypes)
    if not is_aligned(output) or (rank > 1 and row % width):
        width = 1
    packed = (
        width > 1
        and is_aligned(operand)
        and strides[-1] == 1
        and all(stride % width == 0 for stride in strides[:-1])
        for operand, strides in zip(operands, loops.strides, strict=True)
    )
    is_wide = loops.needs_64_bit_offsets() or loops.numel + THREADS * width > 2**31 - 1
    padded = loops.padded()
    source.launch(
        f"{kernel}<{cuda_types(dtypes)}, {index_type(is_wide)}, {rank}, {width}, {flags(*packed)}>",
        grid=(ceil_div(loops.numel, THREADS * width), 1, 1),
        block=(THREADS, 1, 1),
        args=(*operands, output, i64(loops.numel), *numbers(padded.sizes, *padded.strides)),
    )


def spread_rows(rows: int, tile_rows: int, programs: int) -> tuple[int, int]:
    """Return the number of workers that share the rows, at most ``programs``, and the rows of each,
    a multiple of ``tile_rows``."""
    workers = max(1, min(ceil_div(rows, tile_rows), programs))
    per_worker = ceil_div(ceil_div(rows, workers), tile_rows) * tile_rows
    return ceil_div(rows, per_worker), per_worker


def nest_of(output: Tensor, *operands: Tensor) -> tuple[Nest, tuple[Tensor, ...]]:
    """Return the loop nest for operands broadcast to ``output``, and the operands. Operands that
    would need a rank above 5 are first copied to the output's layout."""
    operands = tuple(operand.expand(output.shape) for operand in operands)
    loops = nest(output, [operand.stride() for operand in operands])
    if len(loops.sizes) > MAX_RANK:
        operands = tuple(torch.empty_like(output, dtype=op.dtype).copy_(op) for op in operands)
        loops = nest(output, [operand.stride() for operand in operands])
    return loops, operands


def launch_cuda(
    source: CudaSource,
    dtypes: Sequence[torch.dtype],
    kernel: str,
    output: Tensor,
    *operands: Tensor,
) -> None:
    """Launch ``kernel`` of ``source``, whose template takes ``dtypes``, unless the output is
    empty."""
    if output.numel():
        loops, operands = nest_of(output, *operands)
        launch_by_packs(source, kernel, loops, dtypes, operands, output)


def launch_triton(kernels: ModuleType, kernel: str, output: Tensor, *operands: Tensor) -> None:
    """Launch ``kernel`` of ``kernels`` if all tensors are dense with the same strides, else
    ``kernel_strided``; launch nothing if the output is empty."""
    if not output.numel():
        return
    loops, operands = nest_of(output, *operands)
    compute = triton_arithmetic(output.dtype)
    if loops.is_flat:
        grid, tile = flat_tile(loops, output.dtype)
        launched, sizes = getattr(kernels, kernel), [loops.numel]
    else:
        grid, tile = tile_of(loops)
        launched, sizes = getattr(kernels, f"{kernel}_strided"), nest_numbers(loops)
    launch(launched, grid, *operands, output, *sizes, COMPUTE=compute, **tile)


def triton_arithmetic(dtype: torch.dtype) -> Any:
    """Return COMPUTE, the arithmetic dtype of a Triton kernel with this output dtype."""
    import triton.language as tl

    return tl.float64 if dtype == torch.float64 else tl.float32


def flat_tile(loops: Nest, output_dtype: torch.dtype) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the grid and the BLOCK of a flat Triton kernel."""
    block = TRITON_BLOCK_BYTES // output_dtype.itemsize
    return (ceil_div(loops.numel, block),), {"BLOCK": block}


def tile_of(loops: Nest) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Return the grid and the tile shape of a strided Triton kernel. Where an operand is
    transposed, tiles are square, so that the cache lines that they touch are reused from L1. Shapes
    are few (nine), because each one compiles a kernel of its own."""
    rows, columns = math.prod(loops.sizes[:-1]), loops.sizes[-1]
    transposed = any(strides[-1] > 1 for strides in loops.strides)
    across = max(4, min(32 if transposed else TRITON_TILE, power_of_two(columns)))
    down = TRITON_TILE // across
    constants = {
        "MATRIX": math.prod(loops.sizes[:-2]) == 1,
        "WIDE": loops.needs_64_bit_offsets() or loops.numel + 2 * TRITON_TILE > 2**31 - 1,
        "BLOCK_ROWS": down,
        "BLOCK_COLUMNS": across,
    }
    return (ceil_div(rows, down) * ceil_div(columns, across),), constants


def nest_numbers(loops: Nest) -> list[int]:
    """Return the arguments of a strided Triton kernel: rows, four inner sizes, five strides per
    operand."""
    padded = loops.padded()
    strides = (stride for strides in padded.strides for stride in strides)
    return [math.prod(padded.sizes[:-1]), *padded.sizes[1:], *strides]
