"""The weight folded over its diagonal, so that a pair of elements is multiplied once: a piece at a
time, which stays in L2 until multiplied."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from fuselab.ops.outer_interaction_linear import triton_kernels
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch

BLOCK = 16  # of j: what a matrix instruction takes of it, and DLRM's embedding width
FOLD_TILE = 64
# Of an H200's L2 (60 MB). Of 512 x 432² in 16 bits that makes 4 pieces of up to 36 MB; the whole
# would be 99.
PIECE_BYTES = 36 * 2**20


def triangle(side: int) -> int:
    """Places on and below the diagonal of a square."""
    return side * (side + 1) // 2


def square_count(width: int) -> int:
    """Squares of BLOCK x BLOCK pairs that hold all pairs i <= j."""
    return triangle(ceil_div(width, BLOCK))


def pair_count(width: int) -> int:
    """Numbers in a row of the folded weight: pairs i <= j and the zeros of its order."""
    return BLOCK * BLOCK * square_count(width)


@dataclass(frozen=True)
class Piece:
    """A run of ``squares`` of BLOCK x BLOCK pairs of the folded weight, from number ``first`` on,
    which ``tiles`` programs per column fold, the first of them ``first_tile``."""

    first: int
    squares: int
    first_tile: int
    tiles: int

    @property
    def pairs(self) -> int:
        return self.squares * BLOCK * BLOCK


def pieces(width: int, columns: int, element_size: int) -> list[Piece]:
    """All of the folded weight in pieces of at most PIECE_BYTES, or of one row of tiles."""
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
    """Each pair's two weights added up, piece after piece in the same memory: ``(columns,
    pairs)``. That is ``scratch``'s, if it is large enough. ``found`` are pieces of tiles of
    ``tile`` other than ``pieces``'."""
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
            weight,
            folded,
            columns,
            width,
            weight.stride(0),
            piece.pairs,
            piece.first_tile,
            piece.first * BLOCK * BLOCK,
            PRECISION=input_precision(weight.dtype),
            BLOCK=BLOCK,
            TILE=tile,
            num_warps=4 if tile == FOLD_TILE else 1,
        )
        yield piece, folded
