"""soft_maximum in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    block_of_columns,
    block_of_rows,
    joined_exponentials,
    load,
    load_partials,
    load_rows,
    of_rows,
    offset,
    share_of_columns,
    shifted_exponentials,
    store_partial,
    with_exponentials,
)


@triton.jit
def soft_maximum(
    # read
    x_pointer,
    # written
    output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_row_strides, x_column_strides, output_row_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (length) and sweeps once over their
    columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep is a
    launch of its own, and SWEEP is its number. A launch of the negative number joins what that
    sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    x_row = x_pointer + offset(row, x_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        logsumexp = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), float('-inf'), COMPUTE)
        logsumexp_3 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            logsumexp, logsumexp_3 = with_exponentials(
                logsumexp, logsumexp_3, tl.where(exists, x, float('-inf')), ROUNDED, PARTS
            )
    else:
        logsumexp = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
        logsumexp_3 = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
    logsumexp, logsumexp_3 = joined_exponentials(logsumexp, logsumexp_3, ROUNDED, PARTS)
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, logsumexp, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 1, logsumexp_3, BLOCK_ROWS, PARTS, SWEEP < 0)
        return
    logsumexp_2 = tl.where(tl.abs(logsumexp) == float('inf'), 0.0, logsumexp)
    if PARTS != 0:
        logsumexp_3 = shifted_exponentials(logsumexp_3, logsumexp, logsumexp_2, ROUNDED)
    else:  # the terms of a row are still in registers
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            logsumexp_3 += tl.where(exists, math.exp(x - logsumexp_2, ROUNDED), 0.0)
        logsumexp_3 = of_rows(tl.sum(logsumexp_3, 1))
    output = math.log(logsumexp_3, ROUNDED) + logsumexp_2
    tl.store(
        output_pointer + offset(row, output_row_strides),
        output.to(output_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit
def soft_maximum_backward(
    # read
    grad_output_pointer, x_pointer,
    # written
    grad_x_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    grad_output_row_strides, x_row_strides, x_column_strides, grad_x_row_strides,
    grad_x_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns BLOCK_ROWS rows (length) and sweeps twice over their
    columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep is a
    launch of its own, and SWEEP is its number. A launch of the negative number joins what that
    sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    x_row = x_pointer + offset(row, x_row_strides)
    grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        logsumexp = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), float('-inf'), COMPUTE)
        logsumexp_3 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            logsumexp, logsumexp_3 = with_exponentials(
                logsumexp, logsumexp_3, tl.where(exists, x, float('-inf')), ROUNDED, PARTS
            )
    else:
        logsumexp = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
        logsumexp_3 = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
    logsumexp, logsumexp_3 = joined_exponentials(logsumexp, logsumexp_3, ROUNDED, PARTS)
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, logsumexp, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 1, logsumexp_3, BLOCK_ROWS, PARTS, SWEEP < 0)
        return
    logsumexp_2 = tl.where(tl.abs(logsumexp) == float('inf'), 0.0, logsumexp)
    if PARTS != 0:
        logsumexp_3 = shifted_exponentials(logsumexp_3, logsumexp, logsumexp_2, ROUNDED)
    else:  # the terms of a row are still in registers
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            logsumexp_3 += tl.where(exists, math.exp(x - logsumexp_2, ROUNDED), 0.0)
        logsumexp_3 = of_rows(tl.sum(logsumexp_3, 1))

    grad_output = load_rows(
        grad_output_pointer + offset(row, grad_output_row_strides), is_row
    ).to(COMPUTE)
    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
        exp_1 = math.exp(x - (math.log(logsumexp_3, ROUNDED) + logsumexp_2), ROUNDED)
        grad_x = grad_output * exp_1
        tl.store(
            grad_x_row + offset(column, grad_x_column_strides),
            grad_x.to(grad_x_pointer.dtype.element_ty),
            exists,
        )
