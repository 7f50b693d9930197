"""clamped in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime.triton_loops import column_offset, larger, row_offset, smaller


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "bias_stride_0", "bias_stride_1", "bias_stride_4",
        "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "bias_stride_6", "output_stride_6"],
)  # fmt: skip
def clamped(
    # read
    x_pointer, bias_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
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
    bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, bias_stride_0, bias_stride_1, bias_stride_2,
        bias_stride_3, ROW_LOOPS
    )
    bias = tl.load(bias_pointer + bias_row + column * bias_stride_6, exists).to(COMPUTE)
    y = larger(x + bias, (-2.5))
    y_2 = smaller(y, 2.5)
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    tl.store(
        output_pointer + output_row + column * output_stride_6,
        tl.where(y_2 > 0, y_2, y_2 * 0.1).to(output_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "bias_stride_0", "bias_stride_1", "bias_stride_4",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "bias_stride_6", "grad_output_stride_6",
        "grad_x_stride_6"],
)  # fmt: skip
def clamped_backward(
    # read
    x_pointer, bias_pointer, grad_output_pointer,
    # written
    grad_x_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
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
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    x = tl.load(x_pointer + x_row + column * x_stride_6, exists).to(COMPUTE)
    bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, bias_stride_0, bias_stride_1, bias_stride_2,
        bias_stride_3, ROW_LOOPS
    )
    bias = tl.load(bias_pointer + bias_row + column * bias_stride_6, exists).to(COMPUTE)
    add = x + bias
    y = larger(add, (-2.5))
    y_2 = smaller(y, 2.5)
    gt = y_2 > 0
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    grad_output_offset = grad_output_row + column * grad_output_stride_6
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    add_26 = tl.where(gt, grad_output, 0) + tl.where(gt, 0, grad_output) * 0.1
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_x = tl.where((add >= (-2.5)) & (add <= 2.5), add_26, 0.0)
    tl.store(
        grad_x_pointer + grad_x_row + column * grad_x_stride_6,
        grad_x.to(grad_x_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4", "grad_bias_stride_0", "grad_bias_stride_1",
        "grad_bias_stride_4"],
    do_not_specialize_on_alignment=["grad_x_stride_6", "grad_bias_stride_6"],
)  # fmt: skip
def clamped_backward_grad_bias(
    # read
    grad_x_pointer,
    # written
    grad_bias_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_bias_stride_0, grad_bias_stride_1, grad_bias_stride_2, grad_bias_stride_3,
    grad_bias_stride_4, grad_bias_stride_5, grad_bias_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_bias. A program owns BLOCK_ROWS rows (channels) with all of their columns
    (batch, height, width), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_bias_stride_0, grad_bias_stride_1,
        grad_bias_stride_2, grad_bias_stride_3, ROW_LOOPS
    )
    grad_x_offset = grad_x_row + column_offset(
        column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
        COLUMN_LOOPS
    )
    grad_x = tl.load(grad_x_pointer + grad_x_offset, exists).to(COMPUTE)
    sum_1 = tl.sum(tl.where(exists, grad_x, 0.0), 1)[:, None]
    tl.store(
        grad_bias_pointer + grad_bias_row, sum_1.to(grad_bias_pointer.dtype.element_ty), row < rows
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4", "grad_bias_stride_0", "grad_bias_stride_1",
        "grad_bias_stride_4"],
    do_not_specialize_on_alignment=["grad_x_stride_6", "grad_bias_stride_6"],
)  # fmt: skip
def clamped_backward_grad_bias_in_blocks(
    # read
    grad_x_pointer,
    # written
    grad_bias_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_bias_stride_0, grad_bias_stride_1, grad_bias_stride_2, grad_bias_stride_3,
    grad_bias_stride_4, grad_bias_stride_5, grad_bias_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_bias. A program owns BLOCK_ROWS rows (channels) and sweeps once over their
    columns (batch, height, width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_bias_stride_0, grad_bias_stride_1,
        grad_bias_stride_2, grad_bias_stride_3, ROW_LOOPS
    )
    sum_1_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_x_offset = grad_x_row + column_offset(
            column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
            COLUMN_LOOPS
        )
        grad_x = tl.load(grad_x_pointer + grad_x_offset, exists).to(COMPUTE)
        sum_1_so_far = sum_1_so_far + tl.where(exists, grad_x, 0.0)
    sum_1 = tl.sum(sum_1_so_far, 1)[:, None]
    tl.store(
        grad_bias_pointer + grad_bias_row, sum_1.to(grad_bias_pointer.dtype.element_ty), row < rows
    )
