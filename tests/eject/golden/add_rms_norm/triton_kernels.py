"""add_rms_norm in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    add_rows,
    block_of_columns,
    block_of_rows,
    load,
    load_partials,
    numel,
    of_rows,
    offset,
    partials_of_turn,
    share_of_columns,
    share_of_rows,
    store_partial,
    store_share,
    sum_of_shares,
    turn_of_rows,
)


@triton.jit
def add_rms_norm(
    # read
    x_pointer, residual_pointer, weight_pointer,
    # written
    hidden_pointer, normed_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    weight_column_strides, hidden_row_strides, hidden_column_strides, normed_row_strides,
    normed_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute hidden, normed. A program owns BLOCK_ROWS rows (batch, length) and sweeps twice
    over their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each
    sweep is a launch of its own, and SWEEP is its number. A launch of the negative number joins
    what that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
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
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
            ).to(COMPUTE)
            hidden = x + residual
            mean += tl.where(exists, hidden * hidden, 0.0)
    else:
        mean = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
    mean = of_rows(tl.sum(mean, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, mean, BLOCK_ROWS, PARTS, SWEEP < 0)
        return

    scale = math.rsqrt(mean / columns + 1e-06, ROUNDED)
    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
        residual = load(
            residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
        ).to(COMPUTE)
        hidden = x + residual
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
    grad_hidden_pointer, grad_normed_pointer, weight_pointer, hidden_pointer,
    # written
    grad_x_pointer, grad_residual_pointer,
    # what programs leave for add_rms_norm_backward_sums to add up
    sums_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    grad_hidden_row_strides, grad_hidden_column_strides, grad_normed_row_strides,
    grad_normed_column_strides, weight_column_strides, hidden_row_strides,
    hidden_column_strides, grad_x_row_strides, grad_x_column_strides, grad_residual_row_strides,
    grad_residual_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, grad_residual, and the sums over the rows of grad_weight. A program owns
    blocks of BLOCK_ROWS rows (batch, length), one after the other, and sweeps over their
    columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep is a
    launch of its own, and SWEEP is its number. A launch of the negative number joins what that
    sweep left; JOINED sweeps have been joined."""
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    grad_weight_sum = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    first_turn, end_turn = share_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS)
    for turn in range(first_turn, end_turn):
        row, is_row = turn_of_rows(turn, row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
        if PARTS > 1:
            turn_partials = partials_of_turn(
                partials_pointer, turn - first_turn, 2, BLOCK_ROWS, PARTS
            )
        grad_hidden_row = grad_hidden_pointer + offset(row, grad_hidden_row_strides)
        grad_normed_row = grad_normed_pointer + offset(row, grad_normed_row_strides)
        hidden_row = hidden_pointer + offset(row, hidden_row_strides)
        grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)
        grad_residual_row = grad_residual_pointer + offset(row, grad_residual_row_strides)

        if SWEEP == 0 or SWEEP == 1:
            mean = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
            sum_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
            for block in range(first, end):
                column, is_column = block_of_columns(
                    block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                )
                exists = is_row & is_column
                hidden = load(
                    hidden_row + offset(column, hidden_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
                grad_normed = load(
                    grad_normed_row + offset(column, grad_normed_column_strides),
                    is_row,
                    is_column,
                    ONCE,
                ).to(COMPUTE)
                weight = load(
                    weight_pointer + offset(column, weight_column_strides), is_row, is_column
                ).to(COMPUTE)
                mul_25 = grad_normed * weight
                mean += tl.where(exists, hidden * hidden, 0.0)
                sum_2 += tl.where(exists, mul_25 * hidden, 0.0)
        else:
            mean = load_partials(turn_partials, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
            sum_2 = load_partials(turn_partials, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
        mean = of_rows(tl.sum(mean, 1))
        sum_2 = of_rows(tl.sum(sum_2, 1))
        if SWEEP == 1 or SWEEP == -1:
            store_partial(turn_partials, 0, mean, BLOCK_ROWS, PARTS, SWEEP < 0)
            store_partial(turn_partials, 1, sum_2, BLOCK_ROWS, PARTS, SWEEP < 0)
        else:
            scale = math.rsqrt(mean / columns + 1e-06, ROUNDED)
            for block in range(first, end):
                column, is_column = block_of_columns(
                    block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                )
                exists = is_row & is_column
                grad_hidden = load(
                    grad_hidden_row + offset(column, grad_hidden_column_strides),
                    is_row,
                    is_column,
                    ONCE,
                ).to(COMPUTE)
                grad_normed = load(
                    grad_normed_row + offset(column, grad_normed_column_strides),
                    is_row,
                    is_column,
                    ONCE,
                ).to(COMPUTE)
                weight = load(
                    weight_pointer + offset(column, weight_column_strides), is_row, is_column
                ).to(COMPUTE)
                mul_25 = grad_normed * weight
                hidden = load(
                    hidden_row + offset(column, hidden_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
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
                grad_weight_sum = add_rows(
                    grad_weight_sum,
                    tl.where(exists, grad_normed * (hidden * scale), 0.0),
                    sums_pointer,
                    0,
                    1,
                    column,
                    column_sizes,
                    is_column,
                    turn > first_turn,
                    PARTS,
                )
    if PARTS == 0:
        store_share(sums_pointer, 0, 1, grad_weight_sum, column_sizes)


@triton.jit(do_not_specialize=["shares"])
def add_rms_norm_backward_sums(
    # read
    sums_pointer,
    # written
    grad_weight_pointer,
    # how many programs left sums; the sizes of the loops, what divides by them, and
    # the strides in them
    shares, column_sizes, column_divisors, grad_weight_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_SHARES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight from the sums that the programs of add_rms_norm_backward left. A
    program owns BLOCK_COLUMNS columns (width) and adds up BLOCK_SHARES programs' sums at a
    time."""
    column, is_column = block_of_columns(
        tl.program_id(0), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE
    )
    grad_weight = sum_of_shares(
        sums_pointer, 0, 1, shares, column_sizes, COMPUTE, BLOCK_SHARES, BLOCK_COLUMNS
    )
    tl.store(
        grad_weight_pointer + offset(column, grad_weight_column_strides),
        grad_weight.to(grad_weight_pointer.dtype.element_ty),
        is_column,
    )
