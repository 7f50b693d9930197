"""sum_of_squares in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime.triton_loops import (
    block_of_columns,
    block_of_rows,
    load,
    load_partials,
    of_rows,
    offset,
    share_of_columns,
    store_partial,
    tile,
)


@triton.jit
def sum_of_squares(
    # read
    x_pointer,
    # written
    output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_column_strides, output_row_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (the whole) and sweeps once over their
    columns (length, width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep
    is a launch of its own, and SWEEP is its number. A launch of the negative number joins what
    that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)

    if SWEEP == 0 or SWEEP == 1:
        sum_1 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(
                x_pointer + offset(column, x_column_strides), is_row, is_column, ONCE
            ).to(COMPUTE)
            sum_1 += tl.where(exists, x * x, 0.0)
    else:
        sum_1 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
    sum_1 = of_rows(tl.sum(sum_1, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, sum_1, BLOCK_ROWS, PARTS, SWEEP < 0)
        return
    tl.store(
        output_pointer + offset(row, output_row_strides),
        sum_1.to(output_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit
def sum_of_squares_backward(
    # read
    grad_output_pointer, x_pointer,
    # written
    grad_x_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    x_strides, grad_x_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    grad_output = tl.load(grad_output_pointer).to(COMPUTE)
    x = load(x_pointer + offset(element, x_strides), is_row, is_column).to(COMPUTE)
    grad_x = grad_output * x + grad_output * x
    tl.store(
        grad_x_pointer + offset(element, grad_x_strides),
        grad_x.to(grad_x_pointer.dtype.element_ty),
        is_row & is_column,
    )
