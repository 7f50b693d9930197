"""activations in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import larger, row_offset, smaller


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "y_stride_0", "y_stride_1", "y_stride_4", "output_stride_0",
        "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "y_stride_6", "output_stride_6"],
)  # fmt: skip
def activations(
    # read
    x_pointer, y_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    y_stride_0, y_stride_1, y_stride_2, y_stride_3, y_stride_4, y_stride_5, y_stride_6,
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
    y_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, y_stride_0, y_stride_1, y_stride_2, y_stride_3,
        ROW_LOOPS
    )
    y = tl.load(y_pointer + y_row + column * y_stride_6, exists).to(COMPUTE)
    mul = tl.where(x > 20, x, libdevice.log1p(libdevice.exp(x))) * tl.where(
        y > 0, y, libdevice.expm1(y)
    )
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    output = mul + x * smaller(larger(x + 3, 0), 6) / 6
    tl.store(
        output_pointer + output_row + column * output_stride_6,
        output.to(output_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "grad_output_stride_0", "grad_output_stride_1",
        "grad_output_stride_4", "y_stride_0", "y_stride_1", "y_stride_4", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4", "grad_y_stride_0", "grad_y_stride_1",
        "grad_y_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "grad_output_stride_6", "y_stride_6",
        "grad_x_stride_6", "grad_y_stride_6"],
)  # fmt: skip
def activations_backward(
    # read
    x_pointer, grad_output_pointer, y_pointer,
    # written
    grad_x_pointer, grad_y_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    y_stride_0, y_stride_1, y_stride_2, y_stride_3, y_stride_4, y_stride_5, y_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_y_stride_0, grad_y_stride_1, grad_y_stride_2, grad_y_stride_3, grad_y_stride_4,
    grad_y_stride_5, grad_y_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, grad_y. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the
    columns are the innermost loop, the rows all others."""
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
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    grad_output_offset = grad_output_row + column * grad_output_stride_6
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    softplus = x > 20
    y_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, y_stride_0, y_stride_1, y_stride_2, y_stride_3,
        ROW_LOOPS
    )
    y = tl.load(y_pointer + y_row + column * y_stride_6, exists).to(COMPUTE)
    mul_17 = grad_output * tl.where(y > 0, y, libdevice.expm1(y))
    softplus_2 = libdevice.exp(x)
    mul_22 = grad_output * tl.where(softplus, x, libdevice.log1p(softplus_2))
    where_3 = tl.where(x <= (-3), 0.0, tl.where(x < 3, grad_output * (x / 3 + 0.5), grad_output))
    where_5 = tl.where(softplus, mul_17, mul_17 * softplus_2 / (softplus_2 + 1.0))
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_x = where_3 + where_5
    tl.store(
        grad_x_pointer + grad_x_row + column * grad_x_stride_6,
        grad_x.to(grad_x_pointer.dtype.element_ty),
        exists,
    )
    grad_y_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_y_stride_0, grad_y_stride_1, grad_y_stride_2,
        grad_y_stride_3, ROW_LOOPS
    )
    grad_y = tl.where(y <= 0, mul_22 * libdevice.exp(y), mul_22)
    tl.store(
        grad_y_pointer + grad_y_row + column * grad_y_stride_6,
        grad_y.to(grad_y_pointer.dtype.element_ty),
        exists,
    )
