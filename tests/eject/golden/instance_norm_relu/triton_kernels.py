"""instance_norm_relu in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import column_offset, row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "output_stride_6"],
)  # fmt: skip
def instance_norm_relu(
    # read
    x_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, channels) with all of their
    columns (height, width), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    instance_norm_total = tl.sum(tl.where(exists, x, 0.0), 1)[:, None]
    instance_norm = x - instance_norm_total / columns
    instance_norm_squares = tl.sum(tl.where(exists, instance_norm * instance_norm, 0.0), 1)[:, None]
    instance_norm_2 = 1.0 / libdevice.sqrt(instance_norm_squares / columns + 1e-05)
    instance_norm_3 = instance_norm * instance_norm_2
    output_offset = output_row + column_offset(
        column, column_size_1, column_size_2, output_stride_4, output_stride_5, output_stride_6,
        COLUMN_LOOPS
    )
    tl.store(
        output_pointer + output_offset,
        tl.where(instance_norm_3 < 0, 0.0, instance_norm_3).to(output_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "output_stride_6"],
)  # fmt: skip
def instance_norm_relu_in_blocks(
    # read
    x_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, channels) and sweeps 3 times over
    their columns (height, width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, output_stride_0, output_stride_1, output_stride_2,
        output_stride_3, ROW_LOOPS
    )
    instance_norm_total_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        instance_norm_total_so_far = instance_norm_total_so_far + tl.where(exists, x, 0.0)
    instance_norm_total = tl.sum(instance_norm_total_so_far, 1)[:, None]
    instance_norm_squares_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        instance_norm = x - instance_norm_total / columns
        instance_norm_squares_so_far = instance_norm_squares_so_far + tl.where(
            exists, instance_norm * instance_norm, 0.0
        )
    instance_norm_squares = tl.sum(instance_norm_squares_so_far, 1)[:, None]
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        instance_norm = x - instance_norm_total / columns
        instance_norm_2 = 1.0 / libdevice.sqrt(instance_norm_squares / columns + 1e-05)
        instance_norm_3 = instance_norm * instance_norm_2
        output_offset = output_row + column_offset(
            column, column_size_1, column_size_2, output_stride_4, output_stride_5, output_stride_6,
            COLUMN_LOOPS
        )
        tl.store(
            output_pointer + output_offset,
            tl.where(instance_norm_3 < 0, 0.0, instance_norm_3).to(output_pointer.dtype.element_ty),
            exists,
        )


@triton.jit(
    do_not_specialize=["batch_channels_height_width_count", "batch_channels_count", "rows",
        "row_size_1", "row_size_2", "column_size_1", "x_stride_0", "x_stride_1", "x_stride_4",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "grad_output_stride_6", "grad_x_stride_6"],
)  # fmt: skip
def instance_norm_relu_backward(
    # read
    x_pointer, grad_output_pointer,
    # written
    grad_x_pointer,
    batch_channels_height_width_count, batch_channels_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (batch, channels) with all of their
    columns (height, width), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    instance_norm_total = tl.sum(tl.where(exists, x, 0.0), 1)[:, None]
    sub_22 = x - instance_norm_total / columns
    instance_norm_squares = tl.sum(tl.where(exists, sub_22 * sub_22, 0.0), 1)[:, None]
    mul_43 = 1.0 / libdevice.sqrt(instance_norm_squares / columns + 1e-05)
    grad_output_offset = grad_output_row + column_offset(
        column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
        grad_output_stride_6, COLUMN_LOOPS
    )
    grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
    instance_norm = sub_22 * mul_43
    where = tl.where(tl.where(instance_norm < 0, 0.0, instance_norm) <= 0, 0, grad_output)
    sum_2 = tl.sum(tl.where(exists, where * sub_22, 0.0), 1)[:, None]
    truediv_1 = 1.0 / (batch_channels_height_width_count / batch_channels_count)
    sum_1 = tl.sum(tl.where(exists, where, 0.0), 1)[:, None]
    sub_24 = where - sub_22 * (sum_2 * truediv_1 * (mul_43 * mul_43)) - sum_1 * truediv_1
    grad_x_offset = grad_x_row + column_offset(
        column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
        COLUMN_LOOPS
    )
    grad_x = sub_24 * mul_43
    tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["batch_channels_height_width_count", "batch_channels_count", "rows",
        "row_size_1", "row_size_2", "column_size_1", "x_stride_0", "x_stride_1", "x_stride_4",
        "grad_output_stride_0", "grad_output_stride_1", "grad_output_stride_4", "grad_x_stride_0",
        "grad_x_stride_1", "grad_x_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "grad_output_stride_6", "grad_x_stride_6"],
)  # fmt: skip
def instance_norm_relu_backward_in_blocks(
    # read
    x_pointer, grad_output_pointer,
    # written
    grad_x_pointer,
    batch_channels_height_width_count, batch_channels_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (batch, channels) and sweeps 4 times over
    their columns (height, width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    grad_output_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_output_stride_0, grad_output_stride_1,
        grad_output_stride_2, grad_output_stride_3, ROW_LOOPS
    )
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    instance_norm_total_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        instance_norm_total_so_far = instance_norm_total_so_far + tl.where(exists, x, 0.0)
    instance_norm_total = tl.sum(instance_norm_total_so_far, 1)[:, None]
    instance_norm_squares_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        sub_22 = x - instance_norm_total / columns
        instance_norm_squares_so_far = instance_norm_squares_so_far + tl.where(
            exists, sub_22 * sub_22, 0.0
        )
    instance_norm_squares = tl.sum(instance_norm_squares_so_far, 1)[:, None]
    mul_43 = 1.0 / libdevice.sqrt(instance_norm_squares / columns + 1e-05)
    sum_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    sum_1_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        sub_22 = x - instance_norm_total / columns
        grad_output_offset = grad_output_row + column_offset(
            column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
            grad_output_stride_6, COLUMN_LOOPS
        )
        grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
        instance_norm = sub_22 * mul_43
        where = tl.where(tl.where(instance_norm < 0, 0.0, instance_norm) <= 0, 0, grad_output)
        sum_2_so_far = sum_2_so_far + tl.where(exists, where * sub_22, 0.0)
        sum_1_so_far = sum_1_so_far + tl.where(exists, where, 0.0)
    sum_2 = tl.sum(sum_2_so_far, 1)[:, None]
    sum_1 = tl.sum(sum_1_so_far, 1)[:, None]
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        sub_22 = x - instance_norm_total / columns
        grad_output_offset = grad_output_row + column_offset(
            column, column_size_1, column_size_2, grad_output_stride_4, grad_output_stride_5,
            grad_output_stride_6, COLUMN_LOOPS
        )
        grad_output = tl.load(grad_output_pointer + grad_output_offset, exists).to(COMPUTE)
        instance_norm_2 = sub_22 * mul_43
        where = tl.where(tl.where(instance_norm_2 < 0, 0.0, instance_norm_2) <= 0, 0, grad_output)
        truediv_1 = 1.0 / (batch_channels_height_width_count / batch_channels_count)
        sub_24 = where - sub_22 * (sum_2 * truediv_1 * (mul_43 * mul_43)) - sum_1 * truediv_1
        grad_x_offset = grad_x_row + column_offset(
            column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
            COLUMN_LOOPS
        )
        grad_x = sub_24 * mul_43
        tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)
