"""residual_norm in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import column_offset, row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1",
        "bias_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "weight_stride_6",
        "bias_stride_6", "output_stride_6"],
)  # fmt: skip
def residual_norm(
    # read
    x_pointer, residual_pointer, weight_pointer, bias_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, length) with all of their columns
    (width), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    residual_offset = residual_row + column_offset(
        column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
        residual_stride_6, COLUMN_LOOPS
    )
    residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
    hidden = x + residual
    normed_total = tl.sum(tl.where(exists, hidden, 0.0), 1)[:, None]
    normed = hidden - normed_total / columns
    normed_squares = tl.sum(tl.where(exists, normed * normed, 0.0), 1)[:, None]
    normed_2 = normed_squares / columns + 1e-05
    normed_3 = 1.0 / libdevice.sqrt(normed_2)
    normed_4 = normed * normed_3
    weight_offset = column_offset(
        column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
        COLUMN_LOOPS
    )
    weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
    normed_5 = normed_4 * weight
    bias_offset = column_offset(
        column, column_size_1, column_size_2, bias_stride_4, bias_stride_5, bias_stride_6,
        COLUMN_LOOPS
    )
    bias = tl.load(bias_pointer + bias_offset, column < columns).to(COMPUTE)
    normed_6 = normed_5 + bias
    gelu = normed_6 * 0.5 * (libdevice.erf(normed_6 * 0.7071067811865476) + 1)
    output_offset = output_row + column_offset(
        column, column_size_1, column_size_2, output_stride_4, output_stride_5, output_stride_6,
        COLUMN_LOOPS
    )
    output = gelu * 2
    tl.store(output_pointer + output_offset, output.to(output_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1",
        "bias_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "weight_stride_6",
        "bias_stride_6", "output_stride_6"],
)  # fmt: skip
def residual_norm_in_blocks(
    # read
    x_pointer, residual_pointer, weight_pointer, bias_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, length) and sweeps 3 times over
    their columns (width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    normed_total_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed_total_so_far = normed_total_so_far + tl.where(exists, hidden, 0.0)
    normed_total = tl.sum(normed_total_so_far, 1)[:, None]
    normed_squares_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total / columns
        normed_squares_so_far = normed_squares_so_far + tl.where(exists, normed * normed, 0.0)
    normed_squares = tl.sum(normed_squares_so_far, 1)[:, None]
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total / columns
        normed_2 = normed_squares / columns + 1e-05
        normed_3 = 1.0 / libdevice.sqrt(normed_2)
        normed_4 = normed * normed_3
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        normed_5 = normed_4 * weight
        bias_offset = column_offset(
            column, column_size_1, column_size_2, bias_stride_4, bias_stride_5, bias_stride_6,
            COLUMN_LOOPS
        )
        bias = tl.load(bias_pointer + bias_offset, column < columns).to(COMPUTE)
        normed_6 = normed_5 + bias
        gelu = normed_6 * 0.5 * (libdevice.erf(normed_6 * 0.7071067811865476) + 1)
        output_offset = output_row + column_offset(
            column, column_size_1, column_size_2, output_stride_4, output_stride_5, output_stride_6,
            COLUMN_LOOPS
        )
        output = gelu * 2
        tl.store(output_pointer + output_offset, output.to(output_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "weight_stride_0",
        "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1", "bias_stride_4",
        "normed_total_stride_0", "normed_total_stride_1", "normed_total_stride_4",
        "normed_squares_stride_0", "normed_squares_stride_1", "normed_squares_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4", "grad_residual_stride_0",
        "grad_residual_stride_1", "grad_residual_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "grad_output_stride_6",
        "weight_stride_6", "bias_stride_6", "normed_total_stride_6", "normed_squares_stride_6",
        "grad_x_stride_6", "grad_residual_stride_6"],
)  # fmt: skip
def residual_norm_backward(
    # read
    x_pointer, residual_pointer, grad_output_pointer, weight_pointer, bias_pointer,
    # written
    normed_total_pointer, normed_squares_pointer, grad_x_pointer, grad_residual_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    normed_total_stride_0, normed_total_stride_1, normed_total_stride_2, normed_total_stride_3,
    normed_total_stride_4, normed_total_stride_5, normed_total_stride_6,
    normed_squares_stride_0, normed_squares_stride_1, normed_squares_stride_2,
    normed_squares_stride_3, normed_squares_stride_4, normed_squares_stride_5,
    normed_squares_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_residual_stride_0, grad_residual_stride_1, grad_residual_stride_2,
    grad_residual_stride_3, grad_residual_stride_4, grad_residual_stride_5,
    grad_residual_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute normed_total, normed_squares, grad_x, grad_residual. A program owns BLOCK_ROWS
    rows (batch, length) with all of their columns (width), which fit in one block, so that
    every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    normed_total_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_total_stride_0, normed_total_stride_1,
        normed_total_stride_2, normed_total_stride_3, ROW_LOOPS
    )
    normed_squares_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_squares_stride_0, normed_squares_stride_1,
        normed_squares_stride_2, normed_squares_stride_3, ROW_LOOPS
    )
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_residual_stride_0, grad_residual_stride_1,
        grad_residual_stride_2, grad_residual_stride_3, ROW_LOOPS
    )
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    residual_offset = residual_row + column_offset(
        column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
        residual_stride_6, COLUMN_LOOPS
    )
    residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
    hidden = x + residual
    normed_total_2 = tl.sum(tl.where(exists, hidden, 0.0), 1)[:, None]
    normed = hidden - normed_total_2 / columns
    normed_squares_2 = tl.sum(tl.where(exists, normed * normed, 0.0), 1)[:, None]
    normed_2 = normed_squares_2 / columns + 1e-05
    normed_3 = 1.0 / libdevice.sqrt(normed_2)
    grad_output_offset = grad_output_row + column_offset(
        column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
        grad_output_stride_6, COLUMN_LOOPS
    )
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    normed_4 = normed * normed_3
    weight_offset = column_offset(
        column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
        COLUMN_LOOPS
    )
    weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
    normed_5 = normed_4 * weight
    bias_offset = column_offset(
        column, column_size_1, column_size_2, bias_stride_4, bias_stride_5, bias_stride_6,
        COLUMN_LOOPS
    )
    bias = tl.load(bias_pointer + bias_offset, column < columns).to(COMPUTE)
    normed_6 = normed_5 + bias
    mul_31 = libdevice.exp(normed_6 * normed_6 * (-0.5)) * 0.3989422804014327
    add_29 = (libdevice.erf(normed_6 * 0.7071067811865476) + 1) * 0.5 + normed_6 * mul_31
    mul_35 = grad_output * 2 * add_29 * weight
    sum_1 = tl.sum(tl.where(exists, mul_35, 0.0), 1)[:, None]
    sum_2 = tl.sum(tl.where(exists, mul_35 * normed_4, 0.0), 1)[:, None]
    mul_39 = normed_3 / columns * (mul_35 * columns - sum_1 - normed_4 * sum_2)
    tl.store(
        normed_total_pointer + normed_total_row,
        normed_total_2.to(normed_total_pointer.dtype.element_ty),
        row < rows,
    )
    tl.store(
        normed_squares_pointer + normed_squares_row,
        normed_squares_2.to(normed_squares_pointer.dtype.element_ty),
        row < rows,
    )
    grad_x_offset = grad_x_row + column_offset(
        column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
        COLUMN_LOOPS
    )
    tl.store(grad_x_pointer + grad_x_offset, mul_39.to(grad_x_pointer.dtype.element_ty), exists)
    grad_residual_offset = grad_residual_row + column_offset(
        column, column_size_1, column_size_2, grad_residual_stride_4, grad_residual_stride_5,
        grad_residual_stride_6, COLUMN_LOOPS
    )
    tl.store(
        grad_residual_pointer + grad_residual_offset,
        mul_39.to(grad_residual_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "weight_stride_0",
        "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1", "bias_stride_4",
        "normed_total_stride_0", "normed_total_stride_1", "normed_total_stride_4",
        "normed_squares_stride_0", "normed_squares_stride_1", "normed_squares_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4", "grad_residual_stride_0",
        "grad_residual_stride_1", "grad_residual_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "grad_output_stride_6",
        "weight_stride_6", "bias_stride_6", "normed_total_stride_6", "normed_squares_stride_6",
        "grad_x_stride_6", "grad_residual_stride_6"],
)  # fmt: skip
def residual_norm_backward_in_blocks(
    # read
    x_pointer, residual_pointer, grad_output_pointer, weight_pointer, bias_pointer,
    # written
    normed_total_pointer, normed_squares_pointer, grad_x_pointer, grad_residual_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    normed_total_stride_0, normed_total_stride_1, normed_total_stride_2, normed_total_stride_3,
    normed_total_stride_4, normed_total_stride_5, normed_total_stride_6,
    normed_squares_stride_0, normed_squares_stride_1, normed_squares_stride_2,
    normed_squares_stride_3, normed_squares_stride_4, normed_squares_stride_5,
    normed_squares_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_residual_stride_0, grad_residual_stride_1, grad_residual_stride_2,
    grad_residual_stride_3, grad_residual_stride_4, grad_residual_stride_5,
    grad_residual_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute normed_total, normed_squares, grad_x, grad_residual. A program owns BLOCK_ROWS
    rows (batch, length) and sweeps 4 times over their columns (width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    normed_total_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_total_stride_0, normed_total_stride_1,
        normed_total_stride_2, normed_total_stride_3, ROW_LOOPS
    )
    normed_squares_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_squares_stride_0, normed_squares_stride_1,
        normed_squares_stride_2, normed_squares_stride_3, ROW_LOOPS
    )
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_residual_stride_0, grad_residual_stride_1,
        grad_residual_stride_2, grad_residual_stride_3, ROW_LOOPS
    )
    normed_total_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed_total_2_so_far = normed_total_2_so_far + tl.where(exists, hidden, 0.0)
    normed_total_2 = tl.sum(normed_total_2_so_far, 1)[:, None]
    normed_squares_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total_2 / columns
        normed_squares_2_so_far = normed_squares_2_so_far + tl.where(exists, normed * normed, 0.0)
    normed_squares_2 = tl.sum(normed_squares_2_so_far, 1)[:, None]
    normed_2 = normed_squares_2 / columns + 1e-05
    normed_3 = 1.0 / libdevice.sqrt(normed_2)
    sum_1_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    sum_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_output_offset = grad_output_row + column_offset(
            column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
            grad_output_stride_6, COLUMN_LOOPS
        )
        grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total_2 / columns
        normed_4 = normed * normed_3
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        normed_5 = normed_4 * weight
        bias_offset = column_offset(
            column, column_size_1, column_size_2, bias_stride_4, bias_stride_5, bias_stride_6,
            COLUMN_LOOPS
        )
        bias = tl.load(bias_pointer + bias_offset, column < columns).to(COMPUTE)
        normed_6 = normed_5 + bias
        mul_31 = libdevice.exp(normed_6 * normed_6 * (-0.5)) * 0.3989422804014327
        add_29 = (libdevice.erf(normed_6 * 0.7071067811865476) + 1) * 0.5 + normed_6 * mul_31
        mul_35 = grad_output * 2 * add_29 * weight
        sum_1_so_far = sum_1_so_far + tl.where(exists, mul_35, 0.0)
        sum_2_so_far = sum_2_so_far + tl.where(exists, mul_35 * normed_4, 0.0)
    sum_1 = tl.sum(sum_1_so_far, 1)[:, None]
    sum_2 = tl.sum(sum_2_so_far, 1)[:, None]
    tl.store(
        normed_total_pointer + normed_total_row,
        normed_total_2.to(normed_total_pointer.dtype.element_ty),
        row < rows,
    )
    tl.store(
        normed_squares_pointer + normed_squares_row,
        normed_squares_2.to(normed_squares_pointer.dtype.element_ty),
        row < rows,
    )
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_output_offset = grad_output_row + column_offset(
            column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
            grad_output_stride_6, COLUMN_LOOPS
        )
        grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total_2 / columns
        normed_4 = normed * normed_3
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        normed_5 = normed_4 * weight
        bias_offset = column_offset(
            column, column_size_1, column_size_2, bias_stride_4, bias_stride_5, bias_stride_6,
            COLUMN_LOOPS
        )
        bias = tl.load(bias_pointer + bias_offset, column < columns).to(COMPUTE)
        normed_6 = normed_5 + bias
        mul_31_2 = libdevice.exp(normed_6 * normed_6 * (-0.5)) * 0.3989422804014327
        add_29_2 = (libdevice.erf(normed_6 * 0.7071067811865476) + 1) * 0.5 + normed_6 * mul_31_2
        mul_35 = grad_output * 2 * add_29_2 * weight
        mul_39 = normed_3 / columns * (mul_35 * columns - sum_1 - normed_4 * sum_2)
        grad_x_offset = grad_x_row + column_offset(
            column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
            COLUMN_LOOPS
        )
        tl.store(grad_x_pointer + grad_x_offset, mul_39.to(grad_x_pointer.dtype.element_ty), exists)
        grad_residual_offset = grad_residual_row + column_offset(
            column, column_size_1, column_size_2, grad_residual_stride_4, grad_residual_stride_5,
            grad_residual_stride_6, COLUMN_LOOPS
        )
        tl.store(
            grad_residual_pointer + grad_residual_offset,
            mul_39.to(grad_residual_pointer.dtype.element_ty),
            exists,
        )


@triton.jit(
    do_not_specialize=["width_count", "rows", "row_size_1", "row_size_2", "column_size_1",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "normed_total_stride_0", "normed_total_stride_1", "normed_total_stride_4",
        "normed_squares_stride_0", "normed_squares_stride_1", "normed_squares_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1",
        "bias_stride_4", "grad_weight_stride_0", "grad_weight_stride_1", "grad_weight_stride_4",
        "grad_bias_stride_0", "grad_bias_stride_1", "grad_bias_stride_4"],
    do_not_specialize_on_alignment=["grad_output_stride_6", "x_stride_6", "residual_stride_6",
        "normed_total_stride_6", "normed_squares_stride_6", "weight_stride_6", "bias_stride_6",
        "grad_weight_stride_6", "grad_bias_stride_6"],
)  # fmt: skip
def residual_norm_backward_grad_weight(
    # read
    grad_output_pointer, x_pointer, residual_pointer, normed_total_pointer,
    normed_squares_pointer, weight_pointer, bias_pointer,
    # written
    grad_weight_pointer, grad_bias_pointer,
    width_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    normed_total_stride_0, normed_total_stride_1, normed_total_stride_2, normed_total_stride_3,
    normed_total_stride_4, normed_total_stride_5, normed_total_stride_6,
    normed_squares_stride_0, normed_squares_stride_1, normed_squares_stride_2,
    normed_squares_stride_3, normed_squares_stride_4, normed_squares_stride_5,
    normed_squares_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    grad_weight_stride_0, grad_weight_stride_1, grad_weight_stride_2, grad_weight_stride_3,
    grad_weight_stride_4, grad_weight_stride_5, grad_weight_stride_6,
    grad_bias_stride_0, grad_bias_stride_1, grad_bias_stride_2, grad_bias_stride_3,
    grad_bias_stride_4, grad_bias_stride_5, grad_bias_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight, grad_bias. A program owns BLOCK_ROWS rows (width) with all of their
    columns (batch, length), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, weight_stride_0, weight_stride_1, weight_stride_2,
        weight_stride_3, ROW_LOOPS
    )
    bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, bias_stride_0, bias_stride_1, bias_stride_2,
        bias_stride_3, ROW_LOOPS
    )
    grad_weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_weight_stride_0, grad_weight_stride_1,
        grad_weight_stride_2, grad_weight_stride_3, ROW_LOOPS
    )
    grad_bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_bias_stride_0, grad_bias_stride_1,
        grad_bias_stride_2, grad_bias_stride_3, ROW_LOOPS
    )
    grad_output_offset = grad_output_row + column_offset(
        column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
        grad_output_stride_6, COLUMN_LOOPS
    )
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    residual_offset = residual_row + column_offset(
        column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
        residual_stride_6, COLUMN_LOOPS
    )
    residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
    hidden = x + residual
    normed_total_offset = column_offset(
        column, column_size_1, column_size_2, normed_total_stride_4, normed_total_stride_5,
        normed_total_stride_6, COLUMN_LOOPS
    )
    normed_total = tl.load(normed_total_pointer + normed_total_offset, column < columns).to(COMPUTE)
    normed = hidden - normed_total / width_count
    normed_squares_offset = column_offset(
        column, column_size_1, column_size_2, normed_squares_stride_4, normed_squares_stride_5,
        normed_squares_stride_6, COLUMN_LOOPS
    )
    normed_squares = tl.load(normed_squares_pointer + normed_squares_offset, column < columns).to(
        COMPUTE
    )
    normed_2 = normed_squares / width_count + 1e-05
    normed_3 = 1.0 / libdevice.sqrt(normed_2)
    normed_4 = normed * normed_3
    weight = tl.load(weight_pointer + weight_row, row < rows).to(COMPUTE)
    normed_5 = normed_4 * weight
    bias = tl.load(bias_pointer + bias_row, row < rows).to(COMPUTE)
    normed_6 = normed_5 + bias
    mul_31 = libdevice.exp(normed_6 * normed_6 * (-0.5)) * 0.3989422804014327
    add_29 = (libdevice.erf(normed_6 * 0.7071067811865476) + 1) * 0.5 + normed_6 * mul_31
    mul_33 = grad_output * 2 * add_29
    sum_3 = tl.sum(tl.where(exists, mul_33 * normed_4, 0.0), 1)[:, None]
    sum_4 = tl.sum(tl.where(exists, mul_33, 0.0), 1)[:, None]
    tl.store(
        grad_weight_pointer + grad_weight_row,
        sum_3.to(grad_weight_pointer.dtype.element_ty),
        row < rows,
    )
    tl.store(
        grad_bias_pointer + grad_bias_row, sum_4.to(grad_bias_pointer.dtype.element_ty), row < rows
    )


@triton.jit(
    do_not_specialize=["width_count", "rows", "row_size_1", "row_size_2", "column_size_1",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "normed_total_stride_0", "normed_total_stride_1", "normed_total_stride_4",
        "normed_squares_stride_0", "normed_squares_stride_1", "normed_squares_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "bias_stride_0", "bias_stride_1",
        "bias_stride_4", "grad_weight_stride_0", "grad_weight_stride_1", "grad_weight_stride_4",
        "grad_bias_stride_0", "grad_bias_stride_1", "grad_bias_stride_4"],
    do_not_specialize_on_alignment=["grad_output_stride_6", "x_stride_6", "residual_stride_6",
        "normed_total_stride_6", "normed_squares_stride_6", "weight_stride_6", "bias_stride_6",
        "grad_weight_stride_6", "grad_bias_stride_6"],
)  # fmt: skip
def residual_norm_backward_grad_weight_in_blocks(
    # read
    grad_output_pointer, x_pointer, residual_pointer, normed_total_pointer,
    normed_squares_pointer, weight_pointer, bias_pointer,
    # written
    grad_weight_pointer, grad_bias_pointer,
    width_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    normed_total_stride_0, normed_total_stride_1, normed_total_stride_2, normed_total_stride_3,
    normed_total_stride_4, normed_total_stride_5, normed_total_stride_6,
    normed_squares_stride_0, normed_squares_stride_1, normed_squares_stride_2,
    normed_squares_stride_3, normed_squares_stride_4, normed_squares_stride_5,
    normed_squares_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    bias_stride_0, bias_stride_1, bias_stride_2, bias_stride_3, bias_stride_4, bias_stride_5,
    bias_stride_6,
    grad_weight_stride_0, grad_weight_stride_1, grad_weight_stride_2, grad_weight_stride_3,
    grad_weight_stride_4, grad_weight_stride_5, grad_weight_stride_6,
    grad_bias_stride_0, grad_bias_stride_1, grad_bias_stride_2, grad_bias_stride_3,
    grad_bias_stride_4, grad_bias_stride_5, grad_bias_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight, grad_bias. A program owns BLOCK_ROWS rows (width) and sweeps once
    over their columns (batch, length), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, weight_stride_0, weight_stride_1, weight_stride_2,
        weight_stride_3, ROW_LOOPS
    )
    bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, bias_stride_0, bias_stride_1, bias_stride_2,
        bias_stride_3, ROW_LOOPS
    )
    grad_weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_weight_stride_0, grad_weight_stride_1,
        grad_weight_stride_2, grad_weight_stride_3, ROW_LOOPS
    )
    grad_bias_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_bias_stride_0, grad_bias_stride_1,
        grad_bias_stride_2, grad_bias_stride_3, ROW_LOOPS
    )
    weight = tl.load(weight_pointer + weight_row, row < rows).to(COMPUTE)
    bias = tl.load(bias_pointer + bias_row, row < rows).to(COMPUTE)
    sum_3_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    sum_4_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_output_offset = grad_output_row + column_offset(
            column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
            grad_output_stride_6, COLUMN_LOOPS
        )
        grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        normed_total_offset = column_offset(
            column, column_size_1, column_size_2, normed_total_stride_4, normed_total_stride_5,
            normed_total_stride_6, COLUMN_LOOPS
        )
        normed_total = tl.load(normed_total_pointer + normed_total_offset, column < columns).to(
            COMPUTE
        )
        normed = hidden - normed_total / width_count
        normed_squares_offset = column_offset(
            column, column_size_1, column_size_2, normed_squares_stride_4, normed_squares_stride_5,
            normed_squares_stride_6, COLUMN_LOOPS
        )
        normed_squares = tl.load(normed_squares_pointer + normed_squares_offset, column < columns).to(
            COMPUTE
        )
        normed_2 = normed_squares / width_count + 1e-05
        normed_3 = 1.0 / libdevice.sqrt(normed_2)
        normed_4 = normed * normed_3
        normed_5 = normed_4 * weight
        normed_6 = normed_5 + bias
        mul_31 = libdevice.exp(normed_6 * normed_6 * (-0.5)) * 0.3989422804014327
        add_29 = (libdevice.erf(normed_6 * 0.7071067811865476) + 1) * 0.5 + normed_6 * mul_31
        mul_33 = grad_output * 2 * add_29
        sum_3_so_far = sum_3_so_far + tl.where(exists, mul_33 * normed_4, 0.0)
        sum_4_so_far = sum_4_so_far + tl.where(exists, mul_33, 0.0)
    sum_3 = tl.sum(sum_3_so_far, 1)[:, None]
    sum_4 = tl.sum(sum_4_so_far, 1)[:, None]
    tl.store(
        grad_weight_pointer + grad_weight_row,
        sum_3.to(grad_weight_pointer.dtype.element_ty),
        row < rows,
    )
    tl.store(
        grad_bias_pointer + grad_bias_row, sum_4.to(grad_bias_pointer.dtype.element_ty), row < rows
    )
