"""Launching the Triton kernels: which one, and how many rows and warps a program has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from fuselab.ops.softmax import triton_kernels
from fuselab.ops.softmax.layout import Rows, positive, rows_in_place_or_copied
from fuselab.ops.softmax.tensors import cast, empty_gradient, empty_output, readable
from fuselab.runtime.triton_launch import launch


@dataclass(frozen=True, slots=True)
class TritonConfig:
    """Rows up to ``width`` wide: ``rows`` of them per program, ``warps`` warps. One table line."""

    width: int
    rows: int
    warps: int


_TRITON_NARROW = (
    TritonConfig(16, 128, 4),
    TritonConfig(32, 64, 4),
    TritonConfig(64, 32, 4),
    TritonConfig(128, 16, 4),
    TritonConfig(256, 8, 4),
    TritonConfig(512, 4, 4),
)
# 16 elements per thread, as in CUDA_ROWS; 32 from 16384 on, where 1024 threads is all there is.
# Registers for sm_90 (float32 / bfloat16), Triton 3.7.1: forward 4096 wide 40 / 32, 16384 60 / 52,
# 32768 53 / 64; backward 4096 48 / 47, 16384 47 / 47; looped 64 / 61. Nothing spills, all loads and
# stores are 128-bit; 5 block barriers in the forward (maximum, sum), 2 in the backward.
TRITON_ROWS = {
    "forward": (
        *_TRITON_NARROW,
        TritonConfig(1024, 2, 4),
        TritonConfig(2048, 1, 4),
        TritonConfig(4096, 1, 8),
        TritonConfig(8192, 1, 16),
        TritonConfig(16384, 1, 16),
        TritonConfig(32768, 1, 32),
    ),
    "backward": (
        *_TRITON_NARROW,
        TritonConfig(1024, 1, 4),
        TritonConfig(2048, 1, 4),
        TritonConfig(4096, 1, 8),
        TritonConfig(8192, 1, 16),
        TritonConfig(16384, 1, 32),
    ),
}
TRITON_LOOPED_BLOCK = 4096
TRITON_LOOPED_WARPS = 8
# A tile of columns: at most this many elements, 8 to 32 columns across, 8 warps.
TRITON_COLUMNS_TILE = 8192


def triton_candidates(step: str, width: int) -> tuple[TritonConfig, ...]:
    """What tuning may try for rows of ``width``, for ``config=`` of the Triton launchers."""
    block = _power_of_two(width)
    return tuple(
        TritonConfig(block, rows, warps)
        for rows in (1, 2, 4, 8)
        for warps in (1, 2, 4, 8, 16, 32)
        if 4 <= rows * block // (warps * 32) <= (64 if step == "forward" else 32)
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def _launch(
    step: str, rows: Rows, tensors: tuple[Tensor, ...], config: TritonConfig | None
) -> None:
    places = (rows.inner_count, rows.outer_stride, rows.inner_stride, rows.dim_stride)
    double = max(tensor.element_size() for tensor in tensors) == 8
    accumulator = "float64" if double else "float32"
    if rows.columns:
        resident, block, columns = triton_columns(rows)
        launch(
            getattr(triton_kernels, f"{step}_columns"),
            (rows.outer_count * -(-rows.inner_count // columns),),
            *tensors,
            rows.width,
            *places,
            ACCUMULATOR=getattr(tl, accumulator),
            INDEX=_triton_index(rows.widest_offset),
            RESIDENT=resident,
            BLOCK=block,
            COLUMNS=columns,
            num_warps=8,
        )
        return
    config = config or next(
        (config for config in TRITON_ROWS[step] if config.width >= rows.width), None
    )
    if config is not None:
        launch(
            getattr(triton_kernels, f"{step}_rows"),
            (-(-rows.rows // config.rows),),
            *tensors,
            rows.rows,
            rows.width,
            *places,
            ACCUMULATOR=getattr(tl, accumulator),
            ROWS=config.rows,
            BLOCK=_power_of_two(rows.width),
            num_warps=config.warps,
        )
        return
    launch(
        getattr(triton_kernels, f"{step}_looped"),
        (rows.rows,),
        *tensors,
        rows.width,
        *places,
        ACCUMULATOR=getattr(tl, accumulator),
        INDEX=_triton_index(rows.width * max(rows.dim_stride, 1)),
        BLOCK=TRITON_LOOPED_BLOCK,
        num_warps=TRITON_LOOPED_WARPS,
    )


def _triton_index(largest: int) -> object:
    return tl.int64 if largest >= 2**30 else tl.int32


def triton_columns(rows: Rows) -> tuple[bool, int, int]:
    """Whether columns stay in registers, the tile's length along the dimension, and its columns."""
    neighbours = _power_of_two(rows.inner_count)
    length = _power_of_two(rows.width)
    for columns in (32, 16, 8):
        columns = min(columns, neighbours)
        if length * columns <= TRITON_COLUMNS_TILE:
            return True, length, columns
    columns = min(32, neighbours)
    return False, TRITON_COLUMNS_TILE // 4 // columns, columns


def forward(
    input: Tensor, dim: int, dtype: torch.dtype | None, config: TritonConfig | None = None
) -> Tensor:
    """The forward in Triton; ``config`` replaces the table's choice for rows that fit it."""
    output = empty_output(input, dtype)
    if output.numel() == 0:
        return output
    input, rows = rows_in_place_or_copied(readable(input, output.dtype), dim)
    _launch("forward", rows, (input, output), config)
    return output


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
    config: TritonConfig | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradient in Triton; ``config`` as in ``forward``."""
    if not needs[0]:
        return (None,)
    grad_input = empty_gradient(output, input_dtype)
    if grad_input.numel():
        grad_output, rows = rows_in_place_or_copied(grad_output, dim)
        _launch("backward", rows, (grad_output, output.contiguous(), grad_input), config)
    return (cast(grad_input, input_dtype),)


def supports(input: Tensor, dim: int, dtype: torch.dtype | None) -> str | None:
    """A program per row or tile, and CUDA's grid ends at 2^31 - 1."""
    width = input.shape[positive(dim, input)] if input.dim() else 1
    if input.numel() and input.numel() // width >= 2**31:
        return "it has 2^31 rows or more"
    return None
