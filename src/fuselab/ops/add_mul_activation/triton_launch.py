"""Launchers of the Triton kernels of act(input + scale * update + bias)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.grid import flat_tile, nest_numbers, tile_of, triton_arithmetic
from fuselab.ops._shared.layout import Nest
from fuselab.ops.add_mul_activation import configs
from fuselab.ops.add_mul_activation.layout import (
    Gradients,
    Matrices,
    Operands,
    Saved,
    flat_columns,
    run_backward,
    run_forward,
)
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.triton_launch import launch, triton_float


def _walk(
    loops: Nest, flat: tuple[int, int] | None, output_dtype: torch.dtype
) -> tuple[str, tuple[int, ...], list[int], dict[str, Any]]:
    """Return the suffix of the kernel's name, the grid, the numbers and the constants of a flat or
    a strided kernel."""
    if flat is None:
        grid, constants = tile_of(loops)
        return "_strided", grid, nest_numbers(loops), constants
    grid, constants = flat_tile(loops, output_dtype)
    block, columns = constants["BLOCK"], flat[0]
    constants |= {
        "VECTOR": math.gcd(columns, 8),
        "WRAPS_ONCE": block <= columns,
        "WIDE": loops.needs_64_bit_offsets() or loops.numel + block > 2**31 - 1,
    }
    return "", grid, [loops.numel, *flat], constants


def add_rows(sums: Tensor, result: Tensor, block_columns: int = 16) -> None:
    """Write the sum of ``sums`` over its first dimension to ``result``, in a fixed order. A program
    has ``block_columns`` columns, 4096 elements at a time."""
    from fuselab.ops.add_mul_activation.triton_kernels import column_sums

    launch(
        column_sums,
        (ceil_div(result.numel(), block_columns),),
        *(sums, result, sums.shape[0], result.numel()),
        BLOCK_ROWS=4096 // block_columns,
        BLOCK_COLUMNS=block_columns,
    )


def forward(*args: Any, output: Tensor | None = None) -> Tensor:
    """Launch ``forward`` if all tensors are dense with the same strides, else
    ``forward_strided``."""
    return run_forward(_forward, output, *args)


def _forward(
    loops: Nest, operands: Operands, scale: float | Tensor, activation: str, output: Tensor
) -> None:
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    flat = flat_columns(loops, None if operands[2] is None else 2, (0, 1))
    suffix, grid, shape, constants = _walk(loops, flat, output.dtype)
    launch(
        getattr(kernels, f"forward{suffix}"),
        grid,
        *(*operands, output, *triton_float(scale), *shape),
        ACTIVATION=activation,
        COMPUTE=triton_arithmetic(output.dtype),
        **constants,
    )


def backward(needs: Sequence[bool], grad_output: Tensor, saved: Saved) -> Gradients:
    """Compute the gradients by one launch of ``backward`` or ``backward_strided``. If the bias's is
    needed, launch ``backward_with_bias``, and ``column_sums`` if there are several row blocks.

    The workspace of the latter is (row blocks, columns) in float64: 4 programs of up to 256 columns
    per multiprocessor, so at most 1 MB on 132 of them. It writes row-major gradients, so a gradient
    with other strides is copied once more, and an operand whose rows have no common stride is
    copied first. The order of the sums depends only on shape and device.
    """
    from fuselab.ops.add_mul_activation import triton_kernels as kernels

    scale = triton_float(saved.scale)
    constants = {
        "ACTIVATION": saved.activation,
        "COMPUTE": triton_arithmetic(grad_output.dtype),
        "FROM_OUTPUT": saved.output is not None,
    }

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        flat = flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2))
        suffix, grid, shape, tile = _walk(loops, flat, grad_output.dtype)
        kernel = getattr(kernels, f"backward{suffix}")
        arguments = (*operands, *grads[:2], *scale, *shape)
        launch(kernel, grid, *arguments, **constants, **tile)

    def with_bias(matrices: Matrices) -> None:
        rows, columns = matrices.rows, matrices.columns
        # Few shapes, because each one is compiled. With few rows a tile has more columns.
        most_across = max(256, configs.TRITON_ELEMENTS // power_of_two(rows))
        across = max(16, min(power_of_two(columns), most_across))
        down = configs.TRITON_ELEMENTS // across
        tiles = ceil_div(columns, across)
        programs = multiprocessors(grad_output.device) * configs.TRITON_PROGRAMS
        blocks, tiles_per_block = configs.row_blocks(rows, down, programs // tiles)
        sums = matrices.empty_sums(blocks)
        launch(
            kernels.backward_with_bias,
            (blocks * tiles,),
            *(*matrices.operands, saved.bias, *matrices.written[:2], sums, *scale),
            *(rows, columns, tiles_per_block * down, *matrices.strides),
            num_warps=configs.TRITON_WARPS,
            **constants,
            WIDE=matrices.needs_64_bit_offsets(),
            BLOCK_ROWS=down,
            BLOCK_COLUMNS=across,
        )
        if blocks > 1:
            add_rows(sums, matrices.grad_bias)

    return run_backward(needs, grad_output, saved, elementwise, with_bias)
