"""The weight folded over its diagonal, so that each pair of elements is multiplied once. It is
folded one piece at a time, and a piece stays in L2 until it is multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fuselab.ops.outer_interaction_linear import triton_kernels
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch

BLOCK = 16  # j's in a block: the depth of a matrix instruction, and DLRM's embedding width
FOLD_TILE = 64
# Bytes of a piece, to fit an H200's L2 (60 MB). 512 x 432² in 16 bits makes 4 pieces of up to
# 36 MB; the whole would be 99 MB.
PIECE_BYTES = 36 * 2**20


def triangle(side: int) -> int:
    """Return the number of places on and below the diagonal of a square."""
    return side * (side + 1) // 2


def square_count(width: int) -> int:
    """Return the number of squares of BLOCK x BLOCK pairs that contain all pairs i <= j."""
    return triangle(ceil_div(width, BLOCK))


def pair_count(width: int) -> int:
    """Return the length of a row of the folded weight: pairs i <= j, and zeros that pad blocks."""
    return BLOCK * BLOCK * square_count(width)


@dataclass(frozen=True)
class Piece:
    """A run of ``squares`` squares of BLOCK x BLOCK pairs of the folded weight, from square number
    ``first`` on. ``tiles`` programs per column fold it, beginning with tile ``first_tile``."""

    first: int
    squares: int
    first_tile: int
    tiles: int

    @property
    def pairs(self) -> int:
        return self.squares * BLOCK * BLOCK


def pieces(width: int, columns: int, element_size: int) -> list[Piece]:
    """Return all of the folded weight in pieces of at most PIECE_BYTES, or of one row of tiles."""
    blocks, side = ceil_div(width, BLOCK), FOLD_TILE // BLOCK
    found: list[Piece] = []
    for upper in range(ceil_div(width, FOLD_TILE)):
        first = triangle(upper * side)
        squares = triangle(min((upper + 1) * side, blocks)) - first
        row = Piece(first, squares, triangle(upper), upper + 1)
        if found:
            last = found[-1]
            both = Piece(
                last.first, last.squares + squares, last.first_tile, last.tiles + row.tiles
            )
            if both.pairs * columns * element_size <= PIECE_BYTES:
                found[-1] = both
                continue
        found.append(row)
    return found


def folded_pieces(
    weight: Tensor,
    width: int,
    scratch: Tensor | None = None,
    found: Sequence[Piece] | None = None,
    tile: int = FOLD_TILE,
) -> Iterator[tuple[Piece, Tensor]]:
    """Fold the weight piece by piece and yield each piece with its values, ``(columns, pairs)``.

    All pieces use the same memory: that of ``scratch``, if it is large enough, else a new tensor.
    ``found`` replaces the default ``pieces``, in tiles of ``tile``.
    """
    columns = weight.shape[0]
    if found is None:
        found = pieces(width, columns, weight.element_size())
    numel = columns * max(piece.pairs for piece in found)
    if scratch is None or scratch.numel() < numel:
        scratch = weight.new_empty(numel)
    for piece in found:
        folded = scratch.view(-1)[: columns * piece.pairs].view(columns, piece.pairs)
        launch(
            triton_kernels.fold,
            (columns * piece.tiles,),
            *(weight, folded, columns, width, weight.stride(0), piece.pairs),
            *(piece.first_tile, piece.first * BLOCK * BLOCK),
            PRECISION=input_precision(weight.dtype),
            BLOCK=BLOCK,
            TILE=tile,
            num_warps=4 if tile == FOLD_TILE else 1,
        )
        yield piece, folded
