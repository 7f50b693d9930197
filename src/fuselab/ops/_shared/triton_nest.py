"""The offsets of a strided operand's elements, for the pointwise Triton kernels."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


def unspecialized(*operands: str) -> dict[str, list[str]]:
    """Return ``triton.jit`` options that keep a strided kernel from being compiled again for values
    that hardly matter. The kernel's numbers are rows, size_1 to size_4 and, for every operand, the
    strides _0 to _4. The stride and the length of a row decide how wide loads can be, so they stay
    specialised; of the innermost stride only the value 1 does."""
    return {
        "do_not_specialize": [
            *("rows", "size_1", "size_2", "size_3"),
            *(f"{operand}_{loop}" for operand in operands for loop in range(3)),
        ],
        "do_not_specialize_on_alignment": [f"{operand}_4" for operand in operands],
    }


@triton.jit
def tile_of_nest(
    size_3, size_4, rows, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, WIDE: tl.constexpr
):
    """Return this program's rows (all loops but the innermost), its columns, and the mask of those
    that exist. WIDE: offsets are 64-bit."""
    tile = tl.program_id(0)
    across = tl.cdiv(size_4, BLOCK_COLUMNS)
    row = (tile // across) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = (tile % across) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    if WIDE:
        tile_row = (tile // across).to(tl.int64) * BLOCK_ROWS
        tile_column = (tile % across).to(tl.int64) * BLOCK_COLUMNS
        row = tile_row + tl.arange(0, BLOCK_ROWS)[:, None]
        column = tile_column + tl.arange(0, BLOCK_COLUMNS)[None, :]
    return row, column, (row < rows) & (column < size_4)


@triton.jit
def offset_of(
    row, column, size_1, size_2, size_3, stride_0, stride_1, stride_2, stride_3, stride_4,
    MATRIX: tl.constexpr,
):  # fmt: skip
    """Return an operand's offset in a nest of five loops. MATRIX: the outer three have size 1."""
    if MATRIX:
        return row * stride_3 + column * stride_4
    else:
        offset = (row % size_3) * stride_3
        row = row // size_3
        offset += (row % size_2) * stride_2
        row = row // size_2
        offset += (row % size_1) * stride_1 + (row // size_1) * stride_0
        return offset + column * stride_4
