"""Launchers of the kernels with Hopper's warpgroup matrix instructions, after Triton's fold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_HALF_NAMES
from fuselab.ops._shared.hopper import is_hopper
from fuselab.ops.outer_interaction_linear import products
from fuselab.ops.outer_interaction_linear.folding import BLOCK, folded_pieces, pieces, square_count
from fuselab.ops.outer_interaction_linear.triton_launch import transposed
from fuselab.runtime.cuda_source import CudaSource, i32
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.tensor_map import tensor_map, why_not

WGMMA = CudaSource(Path(__file__).with_name("wgmma_kernels.cu"), architectures=("sm_90a",))

# These sizes are those of wgmma_kernels.cu.
_ROWS, _COLUMNS, _DEPTH, _THREADS = 128, 256, 64, 384
_WEIGHT_COLUMNS = 128


def _shared_bytes(stages: int, stage_bytes: int) -> int:
    """Return the bytes of the ring, 1 KB of barriers, and up to 1 KB of alignment."""
    return 2048 + stages * stage_bytes


_FORWARD_BYTES = _shared_bytes(6, _COLUMNS * _DEPTH * 2)
_WEIGHT_TILE_BYTES = _WEIGHT_COLUMNS * BLOCK * BLOCK * 2
_WEIGHT_BYTES = _shared_bytes(8, (_WEIGHT_COLUMNS + 2 * BLOCK) * _DEPTH * 2) + _WEIGHT_TILE_BYTES
_INPUT_BYTES = _shared_bytes(4, (_ROWS + BLOCK * BLOCK) * _DEPTH * 2)


def supports(dense: Tensor, embeddings: Tensor, weight: Tensor, *rest: Any) -> str | None:
    """Return None for 16-bit floats on Hopper in shapes whose rows are multiples of 16 bytes, else
    the reason."""
    if dense.dtype not in CUDA_HALF_NAMES:
        return "it takes float16 and bfloat16"
    if not is_hopper(dense.device):
        return "it needs a GPU of compute capability 9.0 (Hopper)"
    if embeddings.dim() != 3:
        return None  # `validate` refuses it
    elements = (embeddings.shape[1] + 1) * embeddings.shape[2]
    if elements % BLOCK:
        return f"a sample has {elements} elements; it takes multiples of {BLOCK}"
    if weight.shape[0] % 8:
        return f"there are {weight.shape[0]} outputs; it takes multiples of 8"
    return products.supports(dense, embeddings)


def _output(z: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, weight.shape[0]
    tiles = ceil_div(rows, _ROWS) * ceil_div(columns, _COLUMNS)
    # Every share must have some of the first piece: it writes what later pieces add to.
    splits = min(
        products.shares(tiles, square_count(width), 2, z.device),
        pieces(width, columns, weight.element_size())[0].squares,
    )
    partial = z.new_empty(splits, rows, columns, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        WGMMA.launch(
            f"forward<{CUDA_HALF_NAMES[z.dtype]}>",
            (tiles, splits, 1),
            (_THREADS, 1, 1),
            (
                tensor_map(folded, _COLUMNS, _DEPTH),
                *(z, partial, i32(rows), i32(width), i32(columns), i32(piece.first)),
                *(i32(piece.squares), i32(piece.first > 0)),
            ),
            _FORWARD_BYTES,
        )
    return partial


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    """Write the weight's gradient in one launch, from a copy of z whose samples are contiguous."""
    (rows, width), columns = z.shape, total.shape[1]
    tiles = ceil_div(columns, _WEIGHT_COLUMNS) * square_count(width)
    WGMMA.launch(
        f"weight_gradient<{CUDA_HALF_NAMES[z.dtype]}>",
        (min(tiles, multiprocessors(z.device)), 1, 1),
        (_THREADS, 1, 1),
        (
            tensor_map(_aligned(total), _DEPTH, 64),
            tensor_map(transposed(z), BLOCK, _DEPTH),
            *(grad_weight, i32(rows), i32(width), i32(columns)),
        ),
        _WEIGHT_BYTES,
    )


def _input_gradient(z: Tensor, total: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, total.shape[1]
    total = _aligned(total)
    tiles = ceil_div(rows, _ROWS)
    splits = products.shares(tiles, square_count(width), 2, z.device)
    partial = z.new_zeros(splits, rows, width, dtype=torch.float32)
    for piece, folded in folded_pieces(weight, width, scratch):
        WGMMA.launch(
            f"input_gradient<{CUDA_HALF_NAMES[z.dtype]}>",
            (tiles, splits, 1),
            (_THREADS, 1, 1),
            (
                tensor_map(total, _ROWS, _DEPTH),
                tensor_map(folded, _DEPTH, 64),
                *(z, partial, i32(rows), i32(width), i32(columns)),
                *(i32(piece.first), i32(piece.squares)),
            ),
            _INPUT_BYTES,
        )
    return partial


def _aligned(total: Tensor) -> Tensor:
    """Return the upstream gradient, or an aligned copy if TMA cannot read it."""
    return total if why_not(total) is None else total.clone()


_PRODUCTS = products.Products(_output, _input_gradient, _weight_gradient)
forward, backward = _PRODUCTS.forward, _PRODUCTS.backward

CUDA_EXPRESSIONS = tuple(
    f"{kernel}<{element}>"
    for kernel in ("forward", "weight_gradient", "input_gradient")
    for element in CUDA_HALF_NAMES.values()
)
