"""mean_of_two in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    block_of_columns,
    block_of_rows,
    load,
    load_partials,
    numel,
    of_rows,
    offset,
    share_of_columns,
    store_partial,
    tile,
)


@triton.jit
def mean_of_two(
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
    columns (batch, width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep
    is a launch of its own, and SWEEP is its number. A launch of the negative number joins what
    that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    x_row = x_pointer + offset(row, x_row_strides)

    if SWEEP == 0 or SWEEP == 1:
        mean = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            mean += tl.where(exists, x, 0.0)
    else:
        mean = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
    mean = of_rows(tl.sum(mean, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, mean, BLOCK_ROWS, PARTS, SWEEP < 0)
        return
    tl.store(
        output_pointer + offset(row, output_row_strides),
        math.exp(mean / columns, ROUNDED).to(output_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit(do_not_specialize=["batch_width_count"])
def mean_of_two_backward(
    # read
    grad_output_pointer, output_pointer,
    # written
    grad_x_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    batch_width_count, counts, sizes, divisors,
    grad_output_strides, output_strides, grad_x_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    grad_output = load(
        grad_output_pointer + offset(element, grad_output_strides), is_row, is_column
    ).to(COMPUTE)
    output = load(output_pointer + offset(element, output_strides), is_row, is_column).to(COMPUTE)
    grad_x = grad_output * output / batch_width_count
    tl.store(
        grad_x_pointer + offset(element, grad_x_strides),
        grad_x.to(grad_x_pointer.dtype.element_ty),
        is_row & is_column,
    )
