"""in_place in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime.triton_loops import (
    block_of_columns,
    load,
    offset,
    share_of_rows,
    store_share,
    sum_of_shares,
    tile,
    turn_of_rows,
)


@triton.jit
def in_place(
    # read
    x_pointer, bias_pointer,
    # written
    output_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    x_strides, bias_strides, output_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    x = load(x_pointer + offset(element, x_strides), is_row, is_column).to(COMPUTE)
    bias = load(bias_pointer + offset(element, bias_strides), is_row, is_column).to(COMPUTE)
    y = x + bias
    add = y * 2 + 1
    tl.store(
        output_pointer + offset(element, output_strides),
        tl.where(add < 0, 0.0, add).to(output_pointer.dtype.element_ty),
        is_row & is_column,
    )


@triton.jit
def in_place_backward(
    # read
    output_pointer, grad_output_pointer,
    # written
    grad_x_pointer,
    # what programs leave for in_place_backward_sums to add up
    sums_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    output_row_strides, output_column_strides, grad_output_row_strides,
    grad_output_column_strides, grad_x_row_strides, grad_x_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, and the sums over the rows of grad_bias. A program owns BLOCK_COLUMNS
    columns (width) and blocks of BLOCK_ROWS rows (length), one after the other."""
    column, is_column = block_of_columns(
        tl.program_id(1), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE
    )
    grad_bias_sum = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    first_turn, end_turn = share_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS)
    for turn in range(first_turn, end_turn):
        row, is_row = turn_of_rows(turn, row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
        exists = is_row & is_column
        output_row = output_pointer + offset(row, output_row_strides)
        grad_output_row = grad_output_pointer + offset(row, grad_output_row_strides)
        grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)
        output = load(
            output_row + offset(column, output_column_strides), is_row, is_column
        ).to(COMPUTE)
        grad_output = load(
            grad_output_row + offset(column, grad_output_column_strides), is_row, is_column
        ).to(COMPUTE)
        grad_x = tl.where(output <= 0, 0, grad_output) * 2
        tl.store(
            grad_x_row + offset(column, grad_x_column_strides),
            grad_x.to(grad_x_pointer.dtype.element_ty),
            exists,
        )
        grad_bias_sum += tl.where(exists, grad_x, 0.0)
    store_share(sums_pointer, 0, 1, grad_bias_sum, column_sizes)


@triton.jit(do_not_specialize=["shares"])
def in_place_backward_sums(
    # read
    sums_pointer,
    # written
    grad_bias_pointer,
    # how many programs left sums; the sizes of the loops, what divides by them, and
    # the strides in them
    shares, column_sizes, column_divisors, grad_bias_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_SHARES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_bias from the sums that the programs of in_place_backward left. A program
    owns BLOCK_COLUMNS columns (width) and adds up BLOCK_SHARES programs' sums at a time."""
    column, is_column = block_of_columns(
        tl.program_id(0), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE
    )
    grad_bias = sum_of_shares(
        sums_pointer, 0, 1, shares, column_sizes, COMPUTE, BLOCK_SHARES, BLOCK_COLUMNS
    )
    tl.store(
        grad_bias_pointer + offset(column, grad_bias_column_strides),
        grad_bias.to(grad_bias_pointer.dtype.element_ty),
        is_column,
    )
