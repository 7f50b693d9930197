"""add_rms_norm in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    block_of_columns,
    block_of_rows,
    load,
    load_partials,
    numel,
    offset,
    share_of_columns,
    store_partial,
)


@triton.jit
def add_rms_norm(
    # read
    x_pointer, residual_pointer, weight_pointer,
    # written
    hidden_pointer, normed_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    row_sizes, column_sizes,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    weight_column_strides, hidden_row_strides, hidden_column_strides, normed_row_strides,
    normed_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute hidden, normed. A program owns BLOCK_ROWS rows (batch, length) and sweeps twice
    over their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each
    sweep is a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)
    hidden_row = hidden_pointer + offset(row, hidden_row_strides)
    normed_row = normed_pointer + offset(row, normed_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        mean = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column
            ).to(COMPUTE)
            hidden = x + residual
            mean += tl.where(exists, hidden * hidden, 0.0)
    else:
        mean = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
    mean = tl.sum(mean, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, mean, BLOCK_ROWS, PARTS)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
        residual = load(
            residual_row + offset(column, residual_column_strides), is_row, is_column
        ).to(COMPUTE)
        hidden = x + residual
        scale = math.rsqrt(mean / columns + 1e-06, ROUNDED)
        weight = load(
            weight_pointer + offset(column, weight_column_strides), is_row, is_column
        ).to(COMPUTE)
        normed = hidden * scale * weight
        tl.store(
            hidden_row + offset(column, hidden_column_strides),
            hidden.to(hidden_pointer.dtype.element_ty),
            exists,
        )
        tl.store(
            normed_row + offset(column, normed_column_strides),
            normed.to(normed_pointer.dtype.element_ty),
            exists,
        )


@triton.jit
def add_rms_norm_backward(
    # read
    x_pointer, residual_pointer, grad_hidden_pointer, grad_normed_pointer, weight_pointer,
    # written
    mean_pointer, grad_x_pointer, grad_residual_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    row_sizes, column_sizes,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    grad_hidden_row_strides, grad_hidden_column_strides, grad_normed_row_strides,
    grad_normed_column_strides, weight_column_strides, mean_row_strides, grad_x_row_strides,
    grad_x_column_strides, grad_residual_row_strides, grad_residual_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute mean, grad_x, grad_residual. A program owns BLOCK_ROWS rows (batch, length) and
    sweeps twice over their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a
    row, each sweep is a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)
    grad_hidden_row = grad_hidden_pointer + offset(row, grad_hidden_row_strides)
    grad_normed_row = grad_normed_pointer + offset(row, grad_normed_row_strides)
    grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)
    grad_residual_row = grad_residual_pointer + offset(row, grad_residual_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        mean_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        sum_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column
            ).to(COMPUTE)
            hidden = x + residual
            grad_normed = load(
                grad_normed_row + offset(column, grad_normed_column_strides), is_row, is_column
            ).to(COMPUTE)
            weight = load(
                weight_pointer + offset(column, weight_column_strides), is_row, is_column
            ).to(COMPUTE)
            mul_25 = grad_normed * weight
            mean_2 += tl.where(exists, hidden * hidden, 0.0)
            sum_2 += tl.where(exists, mul_25 * hidden, 0.0)
    else:
        mean_2 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
        sum_2 = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS)
    mean_2 = tl.sum(mean_2, 1, keep_dims=True)
    sum_2 = tl.sum(sum_2, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, mean_2, BLOCK_ROWS, PARTS)
        store_partial(partials_pointer, 1, sum_2, BLOCK_ROWS, PARTS)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        grad_hidden = load(
            grad_hidden_row + offset(column, grad_hidden_column_strides), is_row, is_column
        ).to(COMPUTE)
        grad_normed = load(
            grad_normed_row + offset(column, grad_normed_column_strides), is_row, is_column
        ).to(COMPUTE)
        weight = load(
            weight_pointer + offset(column, weight_column_strides), is_row, is_column
        ).to(COMPUTE)
        mul_25 = grad_normed * weight
        scale = math.rsqrt(mean_2 / columns + 1e-06, ROUNDED)
        x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
        residual = load(
            residual_row + offset(column, residual_column_strides), is_row, is_column
        ).to(COMPUTE)
        hidden = x + residual
        mul_31 = sum_2 * (-0.5) * (scale * scale * scale) / columns * (hidden * 2.0)
        grad_x = grad_hidden + mul_25 * scale + mul_31
        tl.store(
            grad_x_row + offset(column, grad_x_column_strides),
            grad_x.to(grad_x_pointer.dtype.element_ty),
            exists,
        )
        tl.store(
            grad_residual_row + offset(column, grad_residual_column_strides),
            grad_x.to(grad_residual_pointer.dtype.element_ty),
            exists,
        )
    tl.store(
        mean_pointer + offset(row, mean_row_strides),
        mean_2.to(mean_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit(do_not_specialize=["width_count"])
def add_rms_norm_backward_grad_weight(
    # read
    grad_normed_pointer, x_pointer, residual_pointer, mean_pointer,
    # written
    grad_weight_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    width_count, row_sizes, column_sizes,
    grad_normed_row_strides, grad_normed_column_strides, x_row_strides, x_column_strides,
    residual_row_strides, residual_column_strides, mean_column_strides, grad_weight_row_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight. A program owns BLOCK_ROWS rows (width) and sweeps once over their
    columns (batch, length), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep
    is a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    grad_normed_row = grad_normed_pointer + offset(row, grad_normed_row_strides)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        sum_1 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            grad_normed = load(
                grad_normed_row + offset(column, grad_normed_column_strides), is_row, is_column
            ).to(COMPUTE)
            x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column
            ).to(COMPUTE)
            hidden = x + residual
            mean = load(
                mean_pointer + offset(column, mean_column_strides), is_row, is_column
            ).to(COMPUTE)
            scale = math.rsqrt(mean / width_count + 1e-06, ROUNDED)
            sum_1 += tl.where(exists, grad_normed * (hidden * scale), 0.0)
    else:
        sum_1 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
    sum_1 = tl.sum(sum_1, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, sum_1, BLOCK_ROWS, PARTS)
        return
    tl.store(
        grad_weight_pointer + offset(row, grad_weight_row_strides),
        sum_1.to(grad_weight_pointer.dtype.element_ty),
        is_row,
    )
