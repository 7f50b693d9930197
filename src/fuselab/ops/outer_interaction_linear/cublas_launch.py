"""float32 by the library's products (cuBLAS): a chunk of the pairs at a time, which Triton writes
into a workspace, in L2 where few samples allow, and takes up from there.

At 2048 x 432 -> 512 the three products are 609 GFLOP, 1.7 ms at the 356 TFLOP/s of a large TF32
product on an H200; the plain layer's are 1174. Beside them z_i z_j is written twice and its
gradient read once, 0.79 GB each, of chunks of 87 MB with their part of the folded weight.
"""

from __future__ import annotations

from collections.abc import Iterator

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

# Of products, or their gradient, and of the folded weight, or its own. us of 2048 x 26 x 16 -> 512
# in TF32 on an H200 (2026-11-21), forward and backward (before the two gains below): 42 MiB 1250,
# 3401; 63 1153, 3169; 82.5 1102, 2791; 126 1143, 2962; 165 1106, 2687; 500 1003, 2652. 82.5 MiB are
# 33 squares there: 4 x 132 tiles of 128 x 256 of the products' gradient, whole waves.
CHUNK_BYTES = 165 * 2**19
# A chunk's sums are added to those before it: with 8 squares, 2048 products a sum, the additions'
# 8 bytes a sum are few beside the 8 KB of products, at any batch.
_LEAST_SQUARES = 8
_ROWS, _COLUMNS = 16, 4  # of a program of Triton's: 16 and 4 KB of a square
_ACROSS_ROWS = 64  # of a program whose samples are neighbours: 64 KB of a square
# pull_products: sums and barriers stay in one warp. The input's gradient takes 1265 us (as above),
# with 16 samples in 8 warps 1454. Its 61 registers would let a multiprocessor have 32 programs: a
# fourth share of the sums.
_PULL_ROWS, _PULL_WARPS, _PULL_PROGRAMS = 2, 1, 24


def supports(
    dense: Tensor,
    embeddings: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> str | None:
    """float32, in TF32 or not as PyTorch's own products."""
    if dense.dtype != torch.float32:
        return "it takes float32"
    return products.supports(dense, embeddings, weight, bias, activation)


def pays(rows: int, elements: int, columns: int) -> bool:
    """Whether this is no slower than the reference.

    Of K² products of a sample P are formed here. The folded weight's 8 P N bytes are written and
    read beside it; 8 B (K² - P) bytes of products and 2 B N (K² - P) operations are spared, and a
    GPU does about 80 operations of TF32 in the time of a byte of memory, of exact float32 fewer.
    So it pays where B (K² - P) (1 + N / 320) >= P N: at 432 -> 512 from 212 samples on. The lines
    through the times at 128 and 2048 samples, of chunks of 63 MiB, meet the reference's at 260
    (forward) and 180 (backward; H200, TF32, 2026-11-21), hence 512. Under 128 MiB of products
    launches count.
    """
    pairs, all_pairs = pair_count(elements), elements**2
    spared = rows * (all_pairs - pairs) * (512 + columns)
    return spared >= 512 * columns * pairs and rows * all_pairs >= 2**25


def chunks(rows: int, width: int, columns: int) -> Iterator[Piece]:
    """All squares of pairs, in runs of one length and what is left."""
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
            z,
            grad_products,
            partial,
            rows,
            width,
            piece.pairs,
            piece.first,
            piece.squares,
            ceil_div(piece.squares, splits),
            BLOCK_ROWS=_PULL_ROWS,
            BLOCK=BLOCK,
            num_warps=_PULL_WARPS,
        )
    return partial


def _weight_gradient(z: Tensor, total: Tensor, grad_weight: Tensor) -> None:
    """Of operands whose samples are neighbours, as TF32's wgmma takes them: 978 us for 1354 (as
    above)."""
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
            z_across,
            products,
            width,
            pitch,
            piece.first,
            BLOCK_ROWS=_ACROSS_ROWS,
            BLOCK=BLOCK,
            num_warps=8,
        )
        grad_folded = room[: columns * piece.pairs].view(columns, piece.pairs)
        torch.mm(total_across, products[: piece.pairs, :rows].t(), out=grad_folded)
        launch(
            triton_kernels.unfold,
            (ceil_div(columns, _COLUMNS), piece.squares),
            grad_folded,
            grad_weight,
            width,
            columns,
            piece.pairs,
            piece.first,
            BLOCK_COLUMNS=_COLUMNS,
            BLOCK=BLOCK,
            num_warps=4,
        )


def _form(z: Tensor, piece: Piece, room: Tensor) -> Tensor:
    """The products of a chunk of pairs, ``(rows, pairs)``, in ``room``."""
    rows, width = z.shape
    formed = room[: rows * piece.pairs].view(rows, piece.pairs)
    launch(
        triton_kernels.form_products,
        (ceil_div(rows, _ROWS), piece.squares),
        z,
        formed,
        rows,
        width,
        piece.pairs,
        piece.first,
        BLOCK_ROWS=_ROWS,
        BLOCK=BLOCK,
        num_warps=4,
    )
    return formed


_PRODUCTS = products.Products(_output, _input_gradient, _weight_gradient)
forward, backward = _PRODUCTS.forward, _PRODUCTS.backward
