"""add_rms_norm in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from fuselab.runtime.triton_loops import column_offset, row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "hidden_stride_0",
        "hidden_stride_1", "hidden_stride_4", "normed_stride_0", "normed_stride_1",
        "normed_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "weight_stride_6",
        "hidden_stride_6", "normed_stride_6"],
)  # fmt: skip
def add_rms_norm(
    # read
    x_pointer, residual_pointer, weight_pointer,
    # written
    hidden_pointer, normed_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    hidden_stride_0, hidden_stride_1, hidden_stride_2, hidden_stride_3, hidden_stride_4,
    hidden_stride_5, hidden_stride_6,
    normed_stride_0, normed_stride_1, normed_stride_2, normed_stride_3, normed_stride_4,
    normed_stride_5, normed_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute hidden, normed. A program owns BLOCK_ROWS rows (batch, length) with all of their
    columns (width), which fit in one block, so that every element is read once."""
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
    hidden_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, hidden_stride_0, hidden_stride_1, hidden_stride_2,
        hidden_stride_3, ROW_LOOPS
    )
    normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_stride_0, normed_stride_1, normed_stride_2,
        normed_stride_3, ROW_LOOPS
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
    mean = tl.sum(tl.where(exists, hidden * hidden, 0.0), 1)[:, None]
    scale = 1.0 / libdevice.sqrt(mean / columns + 1e-06)
    weight_offset = column_offset(
        column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
        COLUMN_LOOPS
    )
    weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
    normed = hidden * scale * weight
    hidden_offset = hidden_row + column_offset(
        column, column_size_1, column_size_2, hidden_stride_4, hidden_stride_5, hidden_stride_6,
        COLUMN_LOOPS
    )
    tl.store(hidden_pointer + hidden_offset, hidden.to(hidden_pointer.dtype.element_ty), exists)
    normed_offset = normed_row + column_offset(
        column, column_size_1, column_size_2, normed_stride_4, normed_stride_5, normed_stride_6,
        COLUMN_LOOPS
    )
    tl.store(normed_pointer + normed_offset, normed.to(normed_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "weight_stride_0", "weight_stride_1", "weight_stride_4", "hidden_stride_0",
        "hidden_stride_1", "hidden_stride_4", "normed_stride_0", "normed_stride_1",
        "normed_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "weight_stride_6",
        "hidden_stride_6", "normed_stride_6"],
)  # fmt: skip
def add_rms_norm_in_blocks(
    # read
    x_pointer, residual_pointer, weight_pointer,
    # written
    hidden_pointer, normed_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    hidden_stride_0, hidden_stride_1, hidden_stride_2, hidden_stride_3, hidden_stride_4,
    hidden_stride_5, hidden_stride_6,
    normed_stride_0, normed_stride_1, normed_stride_2, normed_stride_3, normed_stride_4,
    normed_stride_5, normed_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute hidden, normed. A program owns BLOCK_ROWS rows (batch, length) and sweeps twice
    over their columns (width), BLOCK_COLUMNS at a time."""
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
    hidden_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, hidden_stride_0, hidden_stride_1, hidden_stride_2,
        hidden_stride_3, ROW_LOOPS
    )
    normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, normed_stride_0, normed_stride_1, normed_stride_2,
        normed_stride_3, ROW_LOOPS
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
        residual_offset = residual_row + column_offset(
            column, column_size_1, column_size_2, residual_stride_4, residual_stride_5,
            residual_stride_6, COLUMN_LOOPS
        )
        residual = tl.load(residual_pointer + residual_offset, exists).to(COMPUTE)
        hidden = x + residual
        mean_so_far = mean_so_far + tl.where(exists, hidden * hidden, 0.0)
    mean = tl.sum(mean_so_far, 1)[:, None]
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
        scale = 1.0 / libdevice.sqrt(mean / columns + 1e-06)
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        normed = hidden * scale * weight
        hidden_offset = hidden_row + column_offset(
            column, column_size_1, column_size_2, hidden_stride_4, hidden_stride_5, hidden_stride_6,
            COLUMN_LOOPS
        )
        tl.store(hidden_pointer + hidden_offset, hidden.to(hidden_pointer.dtype.element_ty), exists)
        normed_offset = normed_row + column_offset(
            column, column_size_1, column_size_2, normed_stride_4, normed_stride_5, normed_stride_6,
            COLUMN_LOOPS
        )
        tl.store(normed_pointer + normed_offset, normed.to(normed_pointer.dtype.element_ty), exists)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "grad_hidden_stride_0", "grad_hidden_stride_1", "grad_hidden_stride_4",
        "grad_normed_stride_0", "grad_normed_stride_1", "grad_normed_stride_4", "weight_stride_0",
        "weight_stride_1", "weight_stride_4", "mean_stride_0", "mean_stride_1", "mean_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4", "grad_residual_stride_0",
        "grad_residual_stride_1", "grad_residual_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "grad_hidden_stride_6",
        "grad_normed_stride_6", "weight_stride_6", "mean_stride_6", "grad_x_stride_6",
        "grad_residual_stride_6"],
)  # fmt: skip
def add_rms_norm_backward(
    # read
    x_pointer, residual_pointer, grad_hidden_pointer, grad_normed_pointer, weight_pointer,
    # written
    mean_pointer, grad_x_pointer, grad_residual_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    grad_hidden_stride_0, grad_hidden_stride_1, grad_hidden_stride_2, grad_hidden_stride_3,
    grad_hidden_stride_4, grad_hidden_stride_5, grad_hidden_stride_6,
    grad_normed_stride_0, grad_normed_stride_1, grad_normed_stride_2, grad_normed_stride_3,
    grad_normed_stride_4, grad_normed_stride_5, grad_normed_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    mean_stride_0, mean_stride_1, mean_stride_2, mean_stride_3, mean_stride_4, mean_stride_5,
    mean_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_residual_stride_0, grad_residual_stride_1, grad_residual_stride_2,
    grad_residual_stride_3, grad_residual_stride_4, grad_residual_stride_5,
    grad_residual_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute mean, grad_x, grad_residual. A program owns BLOCK_ROWS rows (batch, length) with
    all of their columns (width), which fit in one block, so that every element is read once."""
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
    grad_hidden_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_hidden_stride_0, grad_hidden_stride_1,
        grad_hidden_stride_2, grad_hidden_stride_3, ROW_LOOPS
    )
    grad_normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_normed_stride_0, grad_normed_stride_1,
        grad_normed_stride_2, grad_normed_stride_3, ROW_LOOPS
    )
    mean_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, mean_stride_0, mean_stride_1, mean_stride_2,
        mean_stride_3, ROW_LOOPS
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
    mean_2 = tl.sum(tl.where(exists, hidden * hidden, 0.0), 1)[:, None]
    grad_hidden_offset = grad_hidden_row + column_offset(
        column, column_size_1, column_size_2, grad_hidden_stride_4, grad_hidden_stride_5,
        grad_hidden_stride_6, COLUMN_LOOPS
    )
    grad_hidden = tl.load(grad_hidden_pointer + grad_hidden_offset, exists).to(COMPUTE)
    grad_normed_offset = grad_normed_row + column_offset(
        column, column_size_1, column_size_2, grad_normed_stride_4, grad_normed_stride_5,
        grad_normed_stride_6, COLUMN_LOOPS
    )
    grad_normed = tl.load(grad_normed_pointer + grad_normed_offset, exists).to(COMPUTE)
    weight_offset = column_offset(
        column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
        COLUMN_LOOPS
    )
    weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
    mul_25 = grad_normed * weight
    scale = 1.0 / libdevice.sqrt(mean_2 / columns + 1e-06)
    sum_2 = tl.sum(tl.where(exists, mul_25 * hidden, 0.0), 1)[:, None]
    mul_31 = sum_2 * (-0.5) * (scale * scale * scale) / columns * (hidden * 2.0)
    grad_x = grad_hidden + mul_25 * scale + mul_31
    tl.store(mean_pointer + mean_row, mean_2.to(mean_pointer.dtype.element_ty), row < rows)
    grad_x_offset = grad_x_row + column_offset(
        column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
        COLUMN_LOOPS
    )
    tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)
    grad_residual_offset = grad_residual_row + column_offset(
        column, column_size_1, column_size_2, grad_residual_stride_4, grad_residual_stride_5,
        grad_residual_stride_6, COLUMN_LOOPS
    )
    tl.store(
        grad_residual_pointer + grad_residual_offset,
        grad_x.to(grad_residual_pointer.dtype.element_ty),
        exists,
    )


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "grad_hidden_stride_0", "grad_hidden_stride_1", "grad_hidden_stride_4",
        "grad_normed_stride_0", "grad_normed_stride_1", "grad_normed_stride_4", "weight_stride_0",
        "weight_stride_1", "weight_stride_4", "mean_stride_0", "mean_stride_1", "mean_stride_4",
        "grad_x_stride_0", "grad_x_stride_1", "grad_x_stride_4", "grad_residual_stride_0",
        "grad_residual_stride_1", "grad_residual_stride_4"],
    do_not_specialize_on_alignment=["x_stride_6", "residual_stride_6", "grad_hidden_stride_6",
        "grad_normed_stride_6", "weight_stride_6", "mean_stride_6", "grad_x_stride_6",
        "grad_residual_stride_6"],
)  # fmt: skip
def add_rms_norm_backward_in_blocks(
    # read
    x_pointer, residual_pointer, grad_hidden_pointer, grad_normed_pointer, weight_pointer,
    # written
    mean_pointer, grad_x_pointer, grad_residual_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    grad_hidden_stride_0, grad_hidden_stride_1, grad_hidden_stride_2, grad_hidden_stride_3,
    grad_hidden_stride_4, grad_hidden_stride_5, grad_hidden_stride_6,
    grad_normed_stride_0, grad_normed_stride_1, grad_normed_stride_2, grad_normed_stride_3,
    grad_normed_stride_4, grad_normed_stride_5, grad_normed_stride_6,
    weight_stride_0, weight_stride_1, weight_stride_2, weight_stride_3, weight_stride_4,
    weight_stride_5, weight_stride_6,
    mean_stride_0, mean_stride_1, mean_stride_2, mean_stride_3, mean_stride_4, mean_stride_5,
    mean_stride_6,
    grad_x_stride_0, grad_x_stride_1, grad_x_stride_2, grad_x_stride_3, grad_x_stride_4,
    grad_x_stride_5, grad_x_stride_6,
    grad_residual_stride_0, grad_residual_stride_1, grad_residual_stride_2,
    grad_residual_stride_3, grad_residual_stride_4, grad_residual_stride_5,
    grad_residual_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute mean, grad_x, grad_residual. A program owns BLOCK_ROWS rows (batch, length) and
    sweeps twice over their columns (width), BLOCK_COLUMNS at a time."""
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
    grad_hidden_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_hidden_stride_0, grad_hidden_stride_1,
        grad_hidden_stride_2, grad_hidden_stride_3, ROW_LOOPS
    )
    grad_normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_normed_stride_0, grad_normed_stride_1,
        grad_normed_stride_2, grad_normed_stride_3, ROW_LOOPS
    )
    mean_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, mean_stride_0, mean_stride_1, mean_stride_2,
        mean_stride_3, ROW_LOOPS
    )
    grad_x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_x_stride_0, grad_x_stride_1, grad_x_stride_2,
        grad_x_stride_3, ROW_LOOPS
    )
    grad_residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_residual_stride_0, grad_residual_stride_1,
        grad_residual_stride_2, grad_residual_stride_3, ROW_LOOPS
    )
    mean_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    sum_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
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
        grad_normed_offset = grad_normed_row + column_offset(
            column, column_size_1, column_size_2, grad_normed_stride_4, grad_normed_stride_5,
            grad_normed_stride_6, COLUMN_LOOPS
        )
        grad_normed = tl.load(grad_normed_pointer + grad_normed_offset, exists).to(COMPUTE)
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        mul_25 = grad_normed * weight
        mean_2_so_far = mean_2_so_far + tl.where(exists, hidden * hidden, 0.0)
        sum_2_so_far = sum_2_so_far + tl.where(exists, mul_25 * hidden, 0.0)
    mean_2 = tl.sum(mean_2_so_far, 1)[:, None]
    sum_2 = tl.sum(sum_2_so_far, 1)[:, None]
    tl.store(mean_pointer + mean_row, mean_2.to(mean_pointer.dtype.element_ty), row < rows)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_hidden_offset = grad_hidden_row + column_offset(
            column, column_size_1, column_size_2, grad_hidden_stride_4, grad_hidden_stride_5,
            grad_hidden_stride_6, COLUMN_LOOPS
        )
        grad_hidden = tl.load(grad_hidden_pointer + grad_hidden_offset, exists).to(COMPUTE)
        grad_normed_offset = grad_normed_row + column_offset(
            column, column_size_1, column_size_2, grad_normed_stride_4, grad_normed_stride_5,
            grad_normed_stride_6, COLUMN_LOOPS
        )
        grad_normed = tl.load(grad_normed_pointer + grad_normed_offset, exists).to(COMPUTE)
        weight_offset = column_offset(
            column, column_size_1, column_size_2, weight_stride_4, weight_stride_5, weight_stride_6,
            COLUMN_LOOPS
        )
        weight = tl.load(weight_pointer + weight_offset, column < columns).to(COMPUTE)
        mul_25 = grad_normed * weight
        scale = 1.0 / libdevice.sqrt(mean_2 / columns + 1e-06)
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
        mul_31 = sum_2 * (-0.5) * (scale * scale * scale) / columns * (hidden * 2.0)
        grad_x = grad_hidden + mul_25 * scale + mul_31
        grad_x_offset = grad_x_row + column_offset(
            column, column_size_1, column_size_2, grad_x_stride_4, grad_x_stride_5, grad_x_stride_6,
            COLUMN_LOOPS
        )
        tl.store(grad_x_pointer + grad_x_offset, grad_x.to(grad_x_pointer.dtype.element_ty), exists)
        grad_residual_offset = grad_residual_row + column_offset(
            column, column_size_1, column_size_2, grad_residual_stride_4, grad_residual_stride_5,
            grad_residual_stride_6, COLUMN_LOOPS
        )
        tl.store(
            grad_residual_pointer + grad_residual_offset,
            grad_x.to(grad_residual_pointer.dtype.element_ty),
            exists,
        )


@triton.jit(
    do_not_specialize=["width_count", "rows", "row_size_1", "row_size_2", "column_size_1",
        "grad_normed_stride_0", "grad_normed_stride_1", "grad_normed_stride_4", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "mean_stride_0", "mean_stride_1", "mean_stride_4", "grad_weight_stride_0",
        "grad_weight_stride_1", "grad_weight_stride_4"],
    do_not_specialize_on_alignment=["grad_normed_stride_6", "x_stride_6", "residual_stride_6",
        "mean_stride_6", "grad_weight_stride_6"],
)  # fmt: skip
def add_rms_norm_backward_grad_weight(
    # read
    grad_normed_pointer, x_pointer, residual_pointer, mean_pointer,
    # written
    grad_weight_pointer,
    width_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_normed_stride_0, grad_normed_stride_1, grad_normed_stride_2, grad_normed_stride_3,
    grad_normed_stride_4, grad_normed_stride_5, grad_normed_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    mean_stride_0, mean_stride_1, mean_stride_2, mean_stride_3, mean_stride_4, mean_stride_5,
    mean_stride_6,
    grad_weight_stride_0, grad_weight_stride_1, grad_weight_stride_2, grad_weight_stride_3,
    grad_weight_stride_4, grad_weight_stride_5, grad_weight_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight. A program owns BLOCK_ROWS rows (width) with all of their columns
    (batch, length), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    grad_normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_normed_stride_0, grad_normed_stride_1,
        grad_normed_stride_2, grad_normed_stride_3, ROW_LOOPS
    )
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    grad_weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_weight_stride_0, grad_weight_stride_1,
        grad_weight_stride_2, grad_weight_stride_3, ROW_LOOPS
    )
    grad_normed_offset = grad_normed_row + column_offset(
        column, column_size_1, column_size_2, grad_normed_stride_4, grad_normed_stride_5,
        grad_normed_stride_6, COLUMN_LOOPS
    )
    grad_normed = tl.load(grad_normed_pointer + grad_normed_offset, exists).to(COMPUTE)
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
    mean_offset = column_offset(
        column, column_size_1, column_size_2, mean_stride_4, mean_stride_5, mean_stride_6,
        COLUMN_LOOPS
    )
    mean = tl.load(mean_pointer + mean_offset, column < columns).to(COMPUTE)
    scale = 1.0 / libdevice.sqrt(mean / width_count + 1e-06)
    sum_1 = tl.sum(tl.where(exists, grad_normed * (hidden * scale), 0.0), 1)[:, None]
    tl.store(
        grad_weight_pointer + grad_weight_row,
        sum_1.to(grad_weight_pointer.dtype.element_ty),
        row < rows,
    )


@triton.jit(
    do_not_specialize=["width_count", "rows", "row_size_1", "row_size_2", "column_size_1",
        "grad_normed_stride_0", "grad_normed_stride_1", "grad_normed_stride_4", "x_stride_0",
        "x_stride_1", "x_stride_4", "residual_stride_0", "residual_stride_1", "residual_stride_4",
        "mean_stride_0", "mean_stride_1", "mean_stride_4", "grad_weight_stride_0",
        "grad_weight_stride_1", "grad_weight_stride_4"],
    do_not_specialize_on_alignment=["grad_normed_stride_6", "x_stride_6", "residual_stride_6",
        "mean_stride_6", "grad_weight_stride_6"],
)  # fmt: skip
def add_rms_norm_backward_grad_weight_in_blocks(
    # read
    grad_normed_pointer, x_pointer, residual_pointer, mean_pointer,
    # written
    grad_weight_pointer,
    width_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    grad_normed_stride_0, grad_normed_stride_1, grad_normed_stride_2, grad_normed_stride_3,
    grad_normed_stride_4, grad_normed_stride_5, grad_normed_stride_6,
    x_stride_0, x_stride_1, x_stride_2, x_stride_3, x_stride_4, x_stride_5, x_stride_6,
    residual_stride_0, residual_stride_1, residual_stride_2, residual_stride_3,
    residual_stride_4, residual_stride_5, residual_stride_6,
    mean_stride_0, mean_stride_1, mean_stride_2, mean_stride_3, mean_stride_4, mean_stride_5,
    mean_stride_6,
    grad_weight_stride_0, grad_weight_stride_1, grad_weight_stride_2, grad_weight_stride_3,
    grad_weight_stride_4, grad_weight_stride_5, grad_weight_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight. A program owns BLOCK_ROWS rows (width) and sweeps once over their
    columns (batch, length), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    grad_normed_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_normed_stride_0, grad_normed_stride_1,
        grad_normed_stride_2, grad_normed_stride_3, ROW_LOOPS
    )
    x_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, x_stride_0, x_stride_1, x_stride_2, x_stride_3,
        ROW_LOOPS
    )
    residual_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, residual_stride_0, residual_stride_1,
        residual_stride_2, residual_stride_3, ROW_LOOPS
    )
    grad_weight_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_weight_stride_0, grad_weight_stride_1,
        grad_weight_stride_2, grad_weight_stride_3, ROW_LOOPS
    )
    sum_1_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        grad_normed_offset = grad_normed_row + column_offset(
            column, column_size_1, column_size_2, grad_normed_stride_4, grad_normed_stride_5,
            grad_normed_stride_6, COLUMN_LOOPS
        )
        grad_normed = tl.load(grad_normed_pointer + grad_normed_offset, exists).to(COMPUTE)
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
        mean_offset = column_offset(
            column, column_size_1, column_size_2, mean_stride_4, mean_stride_5, mean_stride_6,
            COLUMN_LOOPS
        )
        mean = tl.load(mean_pointer + mean_offset, column < columns).to(COMPUTE)
        scale = 1.0 / libdevice.sqrt(mean / width_count + 1e-06)
        sum_1_so_far = sum_1_so_far + tl.where(exists, grad_normed * (hidden * scale), 0.0)
    sum_1 = tl.sum(sum_1_so_far, 1)[:, None]
    tl.store(
        grad_weight_pointer + grad_weight_row,
        sum_1.to(grad_weight_pointer.dtype.element_ty),
        row < rows,
    )
