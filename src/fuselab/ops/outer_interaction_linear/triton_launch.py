"""Launchers of the Triton kernels: their tiles, and how many programs share a tile's sum."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.ops.outer_interaction_linear import products, triton_kernels
from fuselab.ops.outer_interaction_linear.folding import (
    BLOCK,
    FOLD_TILE,
    folded_pieces,
    pair_count,
    square_count,
    triangle,
)
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.matmul_precision import allows_tf32, input_precision
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config

# The share of a program of a matrix kernel: ``rows`` are samples and ``columns`` outputs
# (weight_gradient sums over the rows, input_gradient over the columns). ``pairs_i`` is the number
# of i's in a step of the forward, ``block`` the side of weight_gradient's squares, and
# ``pairs_first`` a constant of weight_gradient.
#
# The 16-bit tiles ("bf16", float16 too) are as wide as the accumulators allow, so that each product
# formed is used in 256 sums; on sm_90 only input_gradient spills, 4 words. Other tiles were not
# faster on an H200. Those of tf32 and fp32 have not been timed; exact float32 has no matrix
# instruction, so its tiles are smaller.
_FORWARD = {
    "bf16": Config(rows=128, columns=256, pairs_i=4, warps=8, stages=3),
    "tf32": Config(rows=128, columns=128, pairs_i=2, warps=8, stages=3),
    "fp32": Config(rows=64, columns=64, pairs_i=1, warps=4, stages=2),
}
_WEIGHT_GRADIENT = {
    "bf16": Config(rows=64, columns=128, block=16, warps=8, stages=4, pairs_first=1),
    "tf32": Config(rows=32, columns=64, block=16, warps=8, stages=3, pairs_first=0),
    "fp32": Config(rows=16, columns=64, block=8, warps=8, stages=2, pairs_first=0),
}
_INPUT_GRADIENT = {
    "bf16": Config(rows=128, columns=64, warps=8, stages=3),
    "tf32": Config(rows=64, columns=32, warps=8, stages=3),
    "fp32": Config(rows=16, columns=16, warps=8, stages=2),
}


def _arithmetic(dtype: torch.dtype) -> str:
    """Return the key of the tables above for a dtype."""
    if dtype == torch.float32:
        return "tf32" if allows_tf32() else "fp32"
    return "bf16"


def _output(z: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, weight.shape[0]
    tile = _FORWARD[_arithmetic(z.dtype)]
    tiles = ceil_div(rows, tile.rows) * ceil_div(columns, tile.columns)
    square_steps = BLOCK // tile.pairs_i
    splits = products.shares(tiles, pair_count(width) // (tile.pairs_i * BLOCK), 8, z.device)
    partial = z.new_empty(splits, rows, columns, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        steps = piece.squares * square_steps
        launch(
            triton_kernels.forward,
            (tiles, splits),
            *(z, folded, partial, rows, width, columns, piece.pairs),
            *(piece.first * square_steps, steps, ceil_div(steps, splits)),
            ADDS=piece.first > 0,
            PRECISION=input_precision(z.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK_I=tile.pairs_i,
            BLOCK=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return partial


def _input_gradient(z: Tensor, total: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, total.shape[1]
    tile = _INPUT_GRADIENT[_arithmetic(z.dtype)]
    tiles = ceil_div(rows, tile.rows)
    splits = products.shares(tiles, square_count(width), 2, z.device)
    partial = z.new_zeros(splits, rows, width, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        launch(
            triton_kernels.input_gradient,
            (tiles, splits),
            *(z, total, folded, partial, rows, width, columns, piece.pairs),
            *(piece.first, piece.squares, ceil_div(piece.squares, splits)),
            PRECISION=input_precision(z.dtype),
            BLOCK_ROWS=tile.rows,
            BLOCK_COLUMNS=tile.columns,
            BLOCK=BLOCK,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return partial


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    (rows, width), columns = z.shape, total.shape[1]
    tile = _WEIGHT_GRADIENT[_arithmetic(z.dtype)]
    launch(
        triton_kernels.weight_gradient,
        (ceil_div(columns, tile.columns) * triangle(ceil_div(width, tile.block)),),
        *(z, total, grad_weight, rows, width, columns),
        PRECISION=input_precision(z.dtype),
        BLOCK_ROWS=tile.rows,
        BLOCK_COLUMNS=tile.columns,
        BLOCK=tile.block,
        PAIRS_FIRST=bool(tile.pairs_first),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def transposed(z: Tensor) -> Tensor:
    """Return z transposed, ``(K, B)``: an element's samples are contiguous, and rows are aligned to
    16 bytes."""
    rows, width = z.shape
    output = z.new_empty(width, ceil_div(rows, 8) * 8)
    launch(
        triton_kernels.transpose,
        (ceil_div(rows, FOLD_TILE), ceil_div(width, FOLD_TILE)),
        *(z, output, rows, width, output.stride(0)),
        TILE=FOLD_TILE,
        num_warps=4,
    )
    return output[:, :rows]


_PRODUCTS = products.Products(_output, _input_gradient, _weight_gradient)
forward, backward, supports = _PRODUCTS.forward, _PRODUCTS.backward, products.supports
