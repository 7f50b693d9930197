"""instance_norm_relu in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    block_of_columns,
    block_of_rows,
    columns_between,
    joined_squares,
    load,
    load_partials,
    mean_of_block,
    numel,
    of_rows,
    offset,
    share_of_columns,
    squares_about_mean,
    store_partial,
)


@triton.jit
def instance_norm_relu(
    # read
    x_pointer,
    # written
    output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_row_strides, x_column_strides, output_row_strides, output_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (batch, channels) and sweeps twice over
    their columns (height, width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each
    sweep is a launch of its own, and SWEEP is its number. A launch of the negative number joins
    what that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    in_share = columns_between(first, end, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    in_first = columns_between(first, first + 1, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    x_row = x_pointer + offset(row, x_row_strides)
    output_row = output_pointer + offset(row, output_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        instance_norm_total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        instance_norm_squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        # Deviations are from the first block's mean, and corrected after the sweep.
        instance_norm_squares_about = tl.full((BLOCK_ROWS, 1), 0.0, COMPUTE)
        if first < end:
            column, is_column = block_of_columns(
                first, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            instance_norm_squares_about = mean_of_block(
                instance_norm_total + tl.where(exists, x, 0.0), in_first, PARTS
            )
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            instance_norm_total += tl.where(exists, x, 0.0)
            instance_norm_squares_terms = x - instance_norm_squares_about
            instance_norm_squares += tl.where(
                exists, instance_norm_squares_terms * instance_norm_squares_terms, 0.0
            )
        instance_norm_squares = squares_about_mean(
            instance_norm_squares, instance_norm_total, instance_norm_squares_about, in_share, PARTS
        )
    else:
        instance_norm_total = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
        instance_norm_squares = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
        in_shares = load_partials(partials_pointer, 2, BLOCK_ROWS, PARTS, JOINED >= 1)
        instance_norm_squares = joined_squares(
            instance_norm_squares, instance_norm_total, in_shares
        )
        in_share = of_rows(tl.sum(in_shares, 1))
    instance_norm_total = of_rows(tl.sum(instance_norm_total, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, instance_norm_total, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 1, instance_norm_squares, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 2, in_share, BLOCK_ROWS, PARTS, SWEEP < 0)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
        instance_norm = x - instance_norm_total / columns
        instance_norm_2 = instance_norm * math.rsqrt(
            instance_norm_squares / columns + 1e-05, ROUNDED
        )
        tl.store(
            output_row + offset(column, output_column_strides),
            tl.where(instance_norm_2 < 0, 0.0, instance_norm_2).to(output_pointer.dtype.element_ty),
            exists,
        )


@triton.jit
def instance_norm_relu_backward(
    # read
    x_pointer, grad_output_pointer,
    # written
    grad_x_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_row_strides, x_column_strides, grad_output_row_strides, grad_output_column_strides,
    grad_x_row_strides, grad_x_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (batch, channels) and sweeps 3 times over
    their columns (height, width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each
    sweep is a launch of its own, and SWEEP is its number. A launch of the negative number joins
    what that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    in_share = columns_between(first, end, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    in_first = columns_between(first, first + 1, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    x_row = x_pointer + offset(row, x_row_strides)
    grad_output_row = grad_output_pointer + offset(row, grad_output_row_strides)
    grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        instance_norm_total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        instance_norm_squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        # Deviations are from the first block's mean, and corrected after the sweep.
        instance_norm_squares_about = tl.full((BLOCK_ROWS, 1), 0.0, COMPUTE)
        if first < end:
            column, is_column = block_of_columns(
                first, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            instance_norm_squares_about = mean_of_block(
                instance_norm_total + tl.where(exists, x, 0.0), in_first, PARTS
            )
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            instance_norm_total += tl.where(exists, x, 0.0)
            instance_norm_squares_terms = x - instance_norm_squares_about
            instance_norm_squares += tl.where(
                exists, instance_norm_squares_terms * instance_norm_squares_terms, 0.0
            )
        instance_norm_squares = squares_about_mean(
            instance_norm_squares, instance_norm_total, instance_norm_squares_about, in_share, PARTS
        )
    else:
        instance_norm_total = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
        instance_norm_squares = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
        in_shares = load_partials(partials_pointer, 4, BLOCK_ROWS, PARTS, JOINED >= 1)
        instance_norm_squares = joined_squares(
            instance_norm_squares, instance_norm_total, in_shares
        )
        in_share = of_rows(tl.sum(in_shares, 1))
    instance_norm_total = of_rows(tl.sum(instance_norm_total, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, instance_norm_total, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 1, instance_norm_squares, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 4, in_share, BLOCK_ROWS, PARTS, SWEEP < 0)
        return

    instance_norm = math.rsqrt(instance_norm_squares / columns + 1e-05, ROUNDED)
    if SWEEP == 0 or SWEEP == 2:
        sum_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        sum_1 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            sub_21 = x - instance_norm_total / columns
            mul_36 = sub_21 * instance_norm
            grad_output = load(
                grad_output_row + offset(column, grad_output_column_strides),
                is_row,
                is_column,
                ONCE,
            ).to(COMPUTE)
            where = tl.where(tl.where(mul_36 < 0, 0.0, mul_36) <= 0, 0, grad_output)
            sum_2 += tl.where(exists, where, 0.0)
            sum_1 += tl.where(exists, where * mul_36, 0.0)
    else:
        sum_2 = load_partials(partials_pointer, 2, BLOCK_ROWS, PARTS, JOINED >= 2)
        sum_1 = load_partials(partials_pointer, 3, BLOCK_ROWS, PARTS, JOINED >= 2)
    sum_2 = of_rows(tl.sum(sum_2, 1))
    sum_1 = of_rows(tl.sum(sum_1, 1))
    if SWEEP == 2 or SWEEP == -2:
        store_partial(partials_pointer, 2, sum_2, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 3, sum_1, BLOCK_ROWS, PARTS, SWEEP < 0)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
        sub_21 = x - instance_norm_total / columns
        mul_36 = sub_21 * instance_norm
        grad_output = load(
            grad_output_row + offset(column, grad_output_column_strides), is_row, is_column, ONCE
        ).to(COMPUTE)
        where = tl.where(tl.where(mul_36 < 0, 0.0, mul_36) <= 0, 0, grad_output)
        grad_x = (where - sum_2 / columns - mul_36 * (sum_1 / columns)) * instance_norm
        tl.store(
            grad_x_row + offset(column, grad_x_column_strides),
            grad_x.to(grad_x_pointer.dtype.element_ty),
            exists,
        )
