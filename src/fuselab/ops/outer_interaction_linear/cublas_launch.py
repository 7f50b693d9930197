"""float32 by the library's products (cuBLAS), one chunk of the pairs at a time.

Triton writes a chunk's products into a workspace, which stays in L2 if the samples are few, and
reads cuBLAS's results from one. At 2048 x 432 -> 512 the three products are 609 GFLOP, 1.7 ms at
the 356 TFLOP/s of a large TF32 product on an H200; the plain layer's are 1174 GFLOP. In addition
z_i z_j is written twice and its gradient read once, 0.79 GB each, in chunks that take 87 MB
together with their part of the folded weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.outer_interaction_linear import products, triton_kernels
from fuselab.ops.outer_interaction_linear.folding import (
    BLOCK,
    Piece,
    folded_pieces,
    pair_count,
    square_count,
)
from fuselab.ops.outer_interaction_linear.triton_launch import transposed
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch

# The bytes of a chunk: products, or their gradient, and the folded weight, or its gradient. 82.5
# MiB are 33 squares at 2048 x 26 x 16 -> 512: they make 4 x 132 tiles of 128 x 256 in the products'
# gradient, whole waves on an H200. Smaller chunks are slower there; 165 MiB gain 4 % in the
# backward and nothing in the forward.
CHUNK_BYTES = 165 * 2**19
# A chunk's sums are added to those before it. With 8 squares, 2048 products per sum, the 8 bytes of
# that addition are few beside the 8 KB of products, at any batch.
_LEAST_SQUARES = 8
_ROWS, _COLUMNS = 16, 4  # of a Triton program: 16 KB and 4 KB of a square
_ACROSS_ROWS = 64  # of a program whose samples are neighbours in memory: 64 KB of a square
# Sizes of pull_products: sums and barriers stay in one warp. Two samples in one warp are faster
# than 16 in 8 warps (the input's gradient takes 1265 us for 1454 on an H200).
_PULL_ROWS, _PULL_WARPS, _PULL_PROGRAMS = 2, 1, 24


def supports(dense: Tensor, *rest: Any) -> str | None:
    """Return None for float32, in TF32 or not as PyTorch's own products; else the reason."""
    if dense.dtype != torch.float32:
        return "it takes float32"
    return products.supports(dense, *rest)


def pays(rows: int, elements: int, columns: int) -> bool:
    """Return whether this is no slower than the reference.

    P of the K² products of a sample are formed here. In return the folded weight's 8 P N bytes are
    written and read, while 8 B (K² - P) bytes of products and 2 B N (K² - P) operations are saved.
    A GPU does about 80 TF32 operations in the time of one byte of memory, fewer in exact float32,
    so by arithmetic this pays where B (K² - P) (1 + N / 320) >= P N: for 432 -> 512 from 212
    samples on. By measurement (TF32, H200) it pays from 260 samples forward and 180 backward; 512
    in place of 320 fits that. Below 128 MiB of products the launches cost more than they save.
    """
    pairs, all_pairs = pair_count(elements), elements**2
    spared = rows * (all_pairs - pairs) * (512 + columns)
    return spared >= 512 * columns * pairs and rows * all_pairs >= 2**25


def chunks(rows: int, width: int, columns: int) -> Iterator[Piece]:
    """Yield all squares of pairs in runs of equal length; the last run may be shorter."""
    total = square_count(width)
    length = max(_LEAST_SQUARES, CHUNK_BYTES // ((rows + columns) * BLOCK * BLOCK * 4))
    for first in range(0, total, length):
        squares = min(length, total - first)
        yield Piece(first, squares, first, squares)


def _output(z: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, weight.shape[0]
    found = list(chunks(rows, width, columns))
    total, products = z.new_empty(rows, columns), z.new_empty(rows * found[0].pairs)
    for piece, folded in folded_pieces(weight, width, scratch, found, BLOCK):
        formed = _form(z, piece, products)
        total.addmm_(formed, folded.t(), beta=min(piece.first, 1))
    return total[None]


def _input_gradient(z: Tensor, total: Tensor, weight: Tensor, scratch: Tensor | None) -> Tensor:
    (rows, width), columns = z.shape, total.shape[1]
    found = list(chunks(rows, width, columns))
    tiles = ceil_div(rows, _PULL_ROWS)
    splits = products.shares(ceil_div(tiles, _PULL_PROGRAMS), found[0].squares, 2, z.device)
    partial = z.new_zeros(splits, rows, width)
    room = z.new_empty(rows * found[0].pairs)
    for piece, folded in folded_pieces(weight, width, scratch, found, BLOCK):
        grad_products = room[: rows * piece.pairs].view(rows, piece.pairs)
        torch.mm(total, folded, out=grad_products)
        launch(
            triton_kernels.pull_products,
            (tiles, splits),
            *(z, grad_products, partial, rows, width, piece.pairs),
            *(piece.first, piece.squares, ceil_div(piece.squares, splits)),
            BLOCK_ROWS=_PULL_ROWS,
            BLOCK=BLOCK,
            num_warps=_PULL_WARPS,
        )
    return partial


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    """Write the weight's gradient. The operands are transposed first, so that samples are
    neighbours as TF32's wgmma needs them: that took 978 us instead of 1354 on an H200."""
    (rows, width), columns = z.shape, total.shape[1]
    z_across, total_across = transposed(z), transposed(total)
    pitch = z_across.stride(0)
    found = list(chunks(pitch, width, columns))
    products = z.new_empty(found[0].pairs, pitch)
    room = z.new_empty(columns * found[0].pairs)
    for piece in found:
        launch(
            triton_kernels.form_across,
            (ceil_div(pitch, _ACROSS_ROWS), piece.squares),
            *(z_across, products, width, pitch, piece.first),
            BLOCK_ROWS=_ACROSS_ROWS,
            BLOCK=BLOCK,
            num_warps=8,
        )
        grad_folded = room[: columns * piece.pairs].view(columns, piece.pairs)
        torch.mm(total_across, products[: piece.pairs, :rows].t(), out=grad_folded)
        launch(
            triton_kernels.unfold,
            (ceil_div(columns, _COLUMNS), piece.squares),
            *(grad_folded, grad_weight, width, columns, piece.pairs, piece.first),
            BLOCK_COLUMNS=_COLUMNS,
            BLOCK=BLOCK,
            num_warps=4,
        )


def _form(z: Tensor, piece: Piece, room: Tensor) -> Tensor:
    """Write the products of a chunk of pairs, ``(rows, pairs)``, into ``room``; return them."""
    rows, width = z.shape
    formed = room[: rows * piece.pairs].view(rows, piece.pairs)
    launch(
        triton_kernels.form_products,
        (ceil_div(rows, _ROWS), piece.squares),
        *(z, formed, rows, width, piece.pairs, piece.first),
        BLOCK_ROWS=_ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return formed


_PRODUCTS = products.Products(_output, _input_gradient, _weight_gradient)
forward, backward = _PRODUCTS.forward, _PRODUCTS.backward
