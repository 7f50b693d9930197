"""residual_norm in Triton, ejected from the PyTorch code in reference.py."""

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
def residual_norm(
    # read
    x_pointer, residual_pointer, weight_pointer, bias_pointer,
    # written
    output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    row_sizes, column_sizes,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    weight_column_strides, bias_column_strides, output_row_strides, output_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, length) and sweeps 3 times over
    their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep is
    a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)
    output_row = output_pointer + offset(row, output_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        normed_total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
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
            normed_total += tl.where(exists, hidden, 0.0)
    else:
        normed_total = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
    normed_total = tl.sum(normed_total, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, normed_total, BLOCK_ROWS, PARTS)
        return

    if SWEEP == 0 or SWEEP == 2:
        normed_squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
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
            normed = hidden - normed_total / columns
            normed_squares += tl.where(exists, normed * normed, 0.0)
    else:
        normed_squares = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS)
    normed_squares = tl.sum(normed_squares, 1, keep_dims=True)
    if SWEEP == 2:
        store_partial(partials_pointer, 1, normed_squares, BLOCK_ROWS, PARTS)
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
        normed = hidden - normed_total / columns
        normed_2 = normed_squares / columns + 1e-05
        normed_3 = math.rsqrt(normed_2, ROUNDED)
        normed_4 = normed * normed_3
        weight = load(
            weight_pointer + offset(column, weight_column_strides), is_row, is_column
        ).to(COMPUTE)
        normed_5 = normed_4 * weight
        bias = load(
            bias_pointer + offset(column, bias_column_strides), is_row, is_column
        ).to(COMPUTE)
        normed_6 = normed_5 + bias
        gelu = normed_6 * 0.5 * (math.erf(normed_6 * 0.7071067811865476, ROUNDED) + 1)
        output = gelu * 2
        tl.store(
            output_row + offset(column, output_column_strides),
            output.to(output_pointer.dtype.element_ty),
            exists,
        )


@triton.jit
def residual_norm_backward(
    # read
    x_pointer, residual_pointer, grad_output_pointer, weight_pointer, bias_pointer,
    # written
    normed_total_pointer, normed_squares_pointer, grad_x_pointer, grad_residual_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    row_sizes, column_sizes,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    grad_output_row_strides, grad_output_column_strides, weight_column_strides,
    bias_column_strides, normed_total_row_strides, normed_squares_row_strides,
    grad_x_row_strides, grad_x_column_strides, grad_residual_row_strides,
    grad_residual_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute normed_total, normed_squares, grad_x, grad_residual. A program owns BLOCK_ROWS
    rows (batch, length) and sweeps 4 times over their columns (width), BLOCK_COLUMNS at a time.
    If PARTS programs share a row, each sweep is a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)
    grad_output_row = grad_output_pointer + offset(row, grad_output_row_strides)
    grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)
    grad_residual_row = grad_residual_pointer + offset(row, grad_residual_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        normed_total_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
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
            normed_total_2 += tl.where(exists, hidden, 0.0)
    else:
        normed_total_2 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
    normed_total_2 = tl.sum(normed_total_2, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, normed_total_2, BLOCK_ROWS, PARTS)
        return

    if SWEEP == 0 or SWEEP == 2:
        normed_squares_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
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
            normed = hidden - normed_total_2 / columns
            normed_squares_2 += tl.where(exists, normed * normed, 0.0)
    else:
        normed_squares_2 = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS)
    normed_squares_2 = tl.sum(normed_squares_2, 1, keep_dims=True)
    if SWEEP == 2:
        store_partial(partials_pointer, 1, normed_squares_2, BLOCK_ROWS, PARTS)
        return

    normed_2 = normed_squares_2 / columns + 1e-05
    normed_3 = math.rsqrt(normed_2, ROUNDED)
    if SWEEP == 0 or SWEEP == 3:
        sum_1 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        sum_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            grad_output = load(
                grad_output_row + offset(column, grad_output_column_strides), is_row, is_column
            ).to(COMPUTE)
            x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column
            ).to(COMPUTE)
            hidden = x + residual
            normed = hidden - normed_total_2 / columns
            normed_4 = normed * normed_3
            weight = load(
                weight_pointer + offset(column, weight_column_strides), is_row, is_column
            ).to(COMPUTE)
            normed_5 = normed_4 * weight
            bias = load(
                bias_pointer + offset(column, bias_column_strides), is_row, is_column
            ).to(COMPUTE)
            normed_6 = normed_5 + bias
            mul_31 = math.exp(normed_6 * normed_6 * (-0.5), ROUNDED) * 0.3989422804014327
            add_29 = (
                (math.erf(normed_6 * 0.7071067811865476, ROUNDED) + 1) * 0.5
                + normed_6 * mul_31
            )
            mul_35 = grad_output * 2 * add_29 * weight
            sum_1 += tl.where(exists, mul_35, 0.0)
            sum_2 += tl.where(exists, mul_35 * normed_4, 0.0)
    else:
        sum_1 = load_partials(partials_pointer, 2, BLOCK_ROWS, PARTS)
        sum_2 = load_partials(partials_pointer, 3, BLOCK_ROWS, PARTS)
    sum_1 = tl.sum(sum_1, 1, keep_dims=True)
    sum_2 = tl.sum(sum_2, 1, keep_dims=True)
    if SWEEP == 3:
        store_partial(partials_pointer, 2, sum_1, BLOCK_ROWS, PARTS)
        store_partial(partials_pointer, 3, sum_2, BLOCK_ROWS, PARTS)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        grad_output = load(
            grad_output_row + offset(column, grad_output_column_strides), is_row, is_column
        ).to(COMPUTE)
        x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
        residual = load(
            residual_row + offset(column, residual_column_strides), is_row, is_column
        ).to(COMPUTE)
        hidden = x + residual
        normed = hidden - normed_total_2 / columns
        normed_4 = normed * normed_3
        weight = load(
            weight_pointer + offset(column, weight_column_strides), is_row, is_column
        ).to(COMPUTE)
        normed_5 = normed_4 * weight
        bias = load(
            bias_pointer + offset(column, bias_column_strides), is_row, is_column
        ).to(COMPUTE)
        normed_6 = normed_5 + bias
        mul_31_2 = math.exp(normed_6 * normed_6 * (-0.5), ROUNDED) * 0.3989422804014327
        add_29_2 = (
            (math.erf(normed_6 * 0.7071067811865476, ROUNDED) + 1) * 0.5
            + normed_6 * mul_31_2
        )
        mul_35 = grad_output * 2 * add_29_2 * weight
        grad_x = normed_3 / columns * (mul_35 * columns - sum_1 - normed_4 * sum_2)
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
        normed_total_pointer + offset(row, normed_total_row_strides),
        normed_total_2.to(normed_total_pointer.dtype.element_ty),
        is_row,
    )
    tl.store(
        normed_squares_pointer + offset(row, normed_squares_row_strides),
        normed_squares_2.to(normed_squares_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit(do_not_specialize=["width_count"])
def residual_norm_backward_grad_weight(
    # read
    grad_output_pointer, x_pointer, residual_pointer, normed_total_pointer,
    normed_squares_pointer, weight_pointer, bias_pointer,
    # written
    grad_weight_pointer, grad_bias_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, and the strides of each tensor in them
    width_count, row_sizes, column_sizes,
    grad_output_row_strides, grad_output_column_strides, x_row_strides, x_column_strides,
    residual_row_strides, residual_column_strides, normed_total_column_strides,
    normed_squares_column_strides, weight_row_strides, bias_row_strides,
    grad_weight_row_strides, grad_bias_row_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight, grad_bias. A program owns BLOCK_ROWS rows (width) and sweeps once
    over their columns (batch, length), BLOCK_COLUMNS at a time. If PARTS programs share a row,
    each sweep is a launch of its own, and SWEEP is its number."""
    row, is_row = block_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    grad_output_row = grad_output_pointer + offset(row, grad_output_row_strides)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)

    weight = tl.load(weight_pointer + offset(row, weight_row_strides), is_row).to(COMPUTE)
    bias = tl.load(bias_pointer + offset(row, bias_row_strides), is_row).to(COMPUTE)
    if SWEEP == 0 or SWEEP == 1:
        sum_3 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        sum_4 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            grad_output = load(
                grad_output_row + offset(column, grad_output_column_strides), is_row, is_column
            ).to(COMPUTE)
            x = load(x_row + offset(column, x_column_strides), is_row, is_column).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column
            ).to(COMPUTE)
            hidden = x + residual
            normed_total = load(
                normed_total_pointer + offset(column, normed_total_column_strides),
                is_row,
                is_column,
            ).to(COMPUTE)
            normed = hidden - normed_total / width_count
            normed_squares = load(
                normed_squares_pointer + offset(column, normed_squares_column_strides),
                is_row,
                is_column,
            ).to(COMPUTE)
            normed_2 = normed_squares / width_count + 1e-05
            normed_3 = math.rsqrt(normed_2, ROUNDED)
            normed_4 = normed * normed_3
            normed_5 = normed_4 * weight
            normed_6 = normed_5 + bias
            mul_31 = math.exp(normed_6 * normed_6 * (-0.5), ROUNDED) * 0.3989422804014327
            add_29 = (
                (math.erf(normed_6 * 0.7071067811865476, ROUNDED) + 1) * 0.5
                + normed_6 * mul_31
            )
            mul_33 = grad_output * 2 * add_29
            sum_3 += tl.where(exists, mul_33 * normed_4, 0.0)
            sum_4 += tl.where(exists, mul_33, 0.0)
    else:
        sum_3 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS)
        sum_4 = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS)
    sum_3 = tl.sum(sum_3, 1, keep_dims=True)
    sum_4 = tl.sum(sum_4, 1, keep_dims=True)
    if SWEEP == 1:
        store_partial(partials_pointer, 0, sum_3, BLOCK_ROWS, PARTS)
        store_partial(partials_pointer, 1, sum_4, BLOCK_ROWS, PARTS)
        return
    tl.store(
        grad_weight_pointer + offset(row, grad_weight_row_strides),
        sum_3.to(grad_weight_pointer.dtype.element_ty),
        is_row,
    )
    tl.store(
        grad_bias_pointer + offset(row, grad_bias_row_strides),
        sum_4.to(grad_bias_pointer.dtype.element_ty),
        is_row,
    )
