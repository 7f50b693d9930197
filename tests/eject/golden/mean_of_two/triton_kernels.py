"""mean_of_two in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import column_offset, row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "output_stride_6"],
)  # fmt: skip
def mean_of_two(
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
    """Compute output. A program owns BLOCK_ROWS rows (length) with all of their columns (batch,
    width), which fit in one block, so that every element is read once."""
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
    mean = tl.sum(tl.where(exists, x, 0.0), 1)[:, None]
    tl.store(
        output_pointer + output_row,
        libdevice.exp(mean / columns).to(output_pointer.dtype.element_ty),
        row < rows,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "output_stride_6"],
)  # fmt: skip
def mean_of_two_in_blocks(
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
    """Compute output. A program owns BLOCK_ROWS rows (length) and sweeps once over their
    columns (batch, width), BLOCK_COLUMNS at a time."""
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
    mean_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        mean_so_far = mean_so_far + tl.where(exists, x, 0.0)
    mean = tl.sum(mean_so_far, 1)[:, None]
    tl.store(
        output_pointer + output_row,
        libdevice.exp(mean / columns).to(output_pointer.dtype.element_ty),
        row < rows,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "grad_output_stride_0",
        "grad_output_stride_1", "grad_output_stride_4", "x_stride_0", "x_stride_1", "x_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4"],
    do_not_specialize_on_alignment=["grad_output_stride_6", "x_stride_6", "grad_x_stride_6"],
)  # fmt: skip
def mean_of_two_backward(
    # read
    grad_output_pointer, x_pointer,
    # written
    grad_x_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (length) with all of their columns (batch,
    width), which fit in one block, so that every element is read once."""
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
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_output = tl.load(grad_output_pointer + grad_output_row, row < rows).to(COMPUTE)
    x_offset = x_row + column_offset(
        column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
    )
    x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
    mean = tl.sum(tl.where(exists, x, 0.0), 1)[:, None]
    grad_x_offset = grad_x_row + column_offset(
        column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
        COLUMN_LOOPS
    )
    grad_x = grad_output * libdevice.exp(mean / columns) / columns
    tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "grad_output_stride_0",
        "grad_output_stride_1", "grad_output_stride_4", "x_stride_0", "x_stride_1", "x_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4"],
    do_not_specialize_on_alignment=["grad_output_stride_6", "x_stride_6", "grad_x_stride_6"],
)  # fmt: skip
def mean_of_two_backward_in_blocks(
    # read
    grad_output_pointer, x_pointer,
    # written
    grad_x_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (length) and sweeps twice over their
    columns (batch, width), BLOCK_COLUMNS at a time."""
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
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    mean_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        x_offset = x_row + column_offset(
            column, column_size_1, column_size_2, x_stride_4, x_stride_5, x_stride_6, COLUMN_LOOPS
        )
        x = tl.load(x_pointer + x_offset, exists).to(COMPUTE)
        mean_so_far = mean_so_far + tl.where(exists, x, 0.0)
    mean = tl.sum(mean_so_far, 1)[:, None]
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_output = tl.load(grad_output_pointer + grad_output_row, row < rows).to(COMPUTE)
        grad_x_offset = grad_x_row + column_offset(
            column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
            COLUMN_LOOPS
        )
        grad_x = grad_output * libdevice.exp(mean / columns) / columns
        tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)
