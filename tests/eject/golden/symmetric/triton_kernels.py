"""symmetric in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "x_2_stride_0", "x_2_stride_1", "x_2_stride_4",
        "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "x_2_stride_6", "output_stride_6"],
)  # fmt: skip
def symmetric(
    # read
    x_pointer, x_2_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    x_2_stride_0, x_2_stride_1, x_2_stride_2, x_2_stride_3, x_2_stride_4, x_2_stride_5,
    x_2_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the innermost loop, the rows all others."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tile_row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    if WIDE:
        column = tile_column.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    x = tl.load(x_pointer + x_row + column * x_stride_6, exists).to(COMPUTE)
    x_2_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_2_stride_0, x_2_stride_1, x_2_stride_2,
        x_2_stride_3, ROW_LOOPS
    )
    x_2 = tl.load(x_2_pointer + x_2_row + column * x_2_stride_6, exists).to(COMPUTE)
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    tl.store(
        output_pointer + output_row + column * output_stride_6,
        libdevice.tanh(x + x_2).to(output_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "grad_output_stride_0",
        "grad_output_stride_1", "grad_output_stride_4", "x_stride_0", "x_stride_1", "x_stride_4",
        "x_2_stride_0", "x_2_stride_1", "x_2_stride_4", "grad_output_2_stride_0",
        "grad_output_2_stride_1", "grad_output_2_stride_4", "grad_x_stride_0", "grad_x_stride_1",
        "grad_x_stride_4"],
    do_not_specialize_on_alignment=["grad_output_stride_6", "x_stride_6", "x_2_stride_6",
        "grad_output_2_stride_6", "grad_x_stride_6"],
)  # fmt: skip
def symmetric_backward(
    # read
    grad_output_pointer, x_pointer, x_2_pointer, grad_output_2_pointer,
    # written
    grad_x_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    x_2_stride_0, x_2_stride_1, x_2_stride_2, x_2_stride_3, x_2_stride_4, x_2_stride_5,
    x_2_stride_6,
    grad_output_2_stride_0, grad_output_2_stride_1, grad_output_2_stride_2,
    grad_output_2_stride_3, grad_output_2_stride_4, grad_output_2_stride_5,
    grad_output_2_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the innermost loop, the rows all others."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tile_row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    if WIDE:
        column = tile_column.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    grad_output_offset = grad_output_row + column * grad_output_stride_6
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    x = tl.load(x_pointer + x_row + column * x_stride_6, exists).to(COMPUTE)
    x_2_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_2_stride_0, x_2_stride_1, x_2_stride_2,
        x_2_stride_3, ROW_LOOPS
    )
    x_2 = tl.load(x_2_pointer + x_2_row + column * x_2_stride_6, exists).to(COMPUTE)
    grad_output_2_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_2_stride_0, grad_output_2_stride_1,
        grad_output_2_stride_2, grad_output_2_stride_3, ROW_LOOPS
    )
    grad_output_2_offset = grad_output_2_row + column * grad_output_2_stride_6
    grad_output_2 = tl.load(grad_output_2_pointer + grad_output_2_offset, exists).to(COMPUTE)
    mul_9 = grad_output * (1 - libdevice.tanh(x + x_2) * libdevice.tanh(x + x_2))
    mul_9_2 = grad_output_2 * (1 - libdevice.tanh(x_2 + x) * libdevice.tanh(x_2 + x))
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_x = mul_9 + mul_9_2
    tl.store(
        grad_x_pointer + grad_x_row + column * grad_x_stride_6,
        grad_x.to(grad_x_pointer.dtype.element_ty),
        exists,
    )
