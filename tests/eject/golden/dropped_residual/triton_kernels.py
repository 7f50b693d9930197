"""dropped_residual in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_dropout as philox
from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import (
    add_rows,
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
    partials_of_turn,
    share_of_columns,
    share_of_rows,
    squares_about_mean,
    store_partial,
    store_share,
    sum_of_shares,
    turn_of_rows,
)


@triton.jit
def dropped_residual(
    # read
    seed_pointer, x_pointer, residual_pointer, weight_pointer, bias_pointer,
    # written
    dropout_kept_pointer, output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    batch_length_width_position_row_strides, batch_length_width_position_column_strides,
    x_row_strides, x_column_strides, residual_row_strides, residual_column_strides,
    weight_column_strides, bias_column_strides, dropout_kept_row_strides,
    dropout_kept_column_strides, output_row_strides, output_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute dropout_kept, output. A program owns BLOCK_ROWS rows (batch, length) and sweeps
    twice over their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row,
    each sweep is a launch of its own, and SWEEP is its number. A launch of the negative number
    joins what that sweep left; JOINED sweeps have been joined."""
    row, is_row = block_of_rows(row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    in_share = columns_between(first, end, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    in_first = columns_between(first, first + 1, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    x_row = x_pointer + offset(row, x_row_strides)
    residual_row = residual_pointer + offset(row, residual_row_strides)
    dropout_kept_row = dropout_kept_pointer + offset(row, dropout_kept_row_strides)
    output_row = output_pointer + offset(row, output_row_strides)

    seed = tl.load(seed_pointer)
    if SWEEP == 0 or SWEEP == 1:
        layer_norm_total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        layer_norm_squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        # Deviations are from the first block's mean, and corrected after the sweep.
        layer_norm_squares_about = tl.full((BLOCK_ROWS, 1), 0.0, COMPUTE)
        if first < end:
            column, is_column = block_of_columns(
                first, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            batch_length_width_position = offset(row, batch_length_width_position_row_strides) + offset(
                column, batch_length_width_position_column_strides
            )
            dropout = philox.kept(seed, batch_length_width_position, 0, 429496729)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
            ).to(COMPUTE)
            hidden = x * dropout.to(COMPUTE) * 1.1111111111111112 + residual
            layer_norm_squares_about = mean_of_block(
                layer_norm_total + tl.where(exists, hidden, 0.0), in_first, PARTS
            )
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
            batch_length_width_position = offset(row, batch_length_width_position_row_strides) + offset(
                column, batch_length_width_position_column_strides
            )
            dropout = philox.kept(seed, batch_length_width_position, 0, 429496729)
            residual = load(
                residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
            ).to(COMPUTE)
            hidden = x * dropout.to(COMPUTE) * 1.1111111111111112 + residual
            layer_norm_total += tl.where(exists, hidden, 0.0)
            layer_norm_squares_terms = hidden - layer_norm_squares_about
            layer_norm_squares += tl.where(
                exists, layer_norm_squares_terms * layer_norm_squares_terms, 0.0
            )
        layer_norm_squares = squares_about_mean(
            layer_norm_squares, layer_norm_total, layer_norm_squares_about, in_share, PARTS
        )
    else:
        layer_norm_total = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
        layer_norm_squares = load_partials(partials_pointer, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
        in_shares = load_partials(partials_pointer, 2, BLOCK_ROWS, PARTS, JOINED >= 1)
        layer_norm_squares = joined_squares(layer_norm_squares, layer_norm_total, in_shares)
        in_share = of_rows(tl.sum(in_shares, 1))
    layer_norm_total = of_rows(tl.sum(layer_norm_total, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, layer_norm_total, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 1, layer_norm_squares, BLOCK_ROWS, PARTS, SWEEP < 0)
        store_partial(partials_pointer, 2, in_share, BLOCK_ROWS, PARTS, SWEEP < 0)
        return

    for block in range(first, end):
        column, is_column = block_of_columns(
            block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
        )
        exists = is_row & is_column
        batch_length_width_position = offset(row, batch_length_width_position_row_strides) + offset(
            column, batch_length_width_position_column_strides
        )
        dropout = philox.kept(seed, batch_length_width_position, 0, 429496729)
        x = load(x_row + offset(column, x_column_strides), is_row, is_column, ONCE).to(COMPUTE)
        residual = load(
            residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
        ).to(COMPUTE)
        hidden = x * dropout.to(COMPUTE) * 1.1111111111111112 + residual
        layer_norm = hidden - layer_norm_total / columns
        weight = load(
            weight_pointer + offset(column, weight_column_strides), is_row, is_column
        ).to(COMPUTE)
        bias = load(
            bias_pointer + offset(column, bias_column_strides), is_row, is_column
        ).to(COMPUTE)
        tl.store(
            dropout_kept_row + offset(column, dropout_kept_column_strides),
            dropout.to(dropout_kept_pointer.dtype.element_ty),
            exists,
        )
        layer_norm_2 = layer_norm * math.rsqrt(layer_norm_squares / columns + 1e-05, ROUNDED)
        output = layer_norm_2 * weight + bias
        tl.store(
            output_row + offset(column, output_column_strides),
            output.to(output_pointer.dtype.element_ty),
            exists,
        )


@triton.jit
def dropped_residual_backward(
    # read
    x_pointer, dropout_kept_pointer, residual_pointer, grad_output_pointer, weight_pointer,
    # written
    grad_residual_pointer, grad_x_pointer,
    # what programs leave for dropped_residual_backward_sums to add up
    sums_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    x_row_strides, x_column_strides, dropout_kept_row_strides, dropout_kept_column_strides,
    residual_row_strides, residual_column_strides, grad_output_row_strides,
    grad_output_column_strides, weight_column_strides, grad_residual_row_strides,
    grad_residual_column_strides, grad_x_row_strides, grad_x_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr, NESTED_ROWS: tl.constexpr,
    NESTED_COLUMNS: tl.constexpr, SWEEP: tl.constexpr, PARTS: tl.constexpr,
    JOINED: tl.constexpr, ONCE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_residual, grad_x, and the sums over the rows of grad_weight, grad_bias. A
    program owns blocks of BLOCK_ROWS rows (batch, length), one after the other, and sweeps over
    their columns (width), BLOCK_COLUMNS at a time. If PARTS programs share a row, each sweep is
    a launch of its own, and SWEEP is its number. A launch of the negative number joins what
    that sweep left; JOINED sweeps have been joined."""
    first, end = share_of_columns(column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    columns = numel(column_sizes)
    in_share = columns_between(first, end, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    in_first = columns_between(first, first + 1, column_sizes, BLOCK_COLUMNS, NESTED_COLUMNS, PARTS)
    grad_weight_sum = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    grad_bias_sum = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    first_turn, end_turn = share_of_rows(row_sizes, BLOCK_ROWS, NESTED_ROWS)
    for turn in range(first_turn, end_turn):
        row, is_row = turn_of_rows(turn, row_sizes, row_divisors, BLOCK_ROWS, NESTED_ROWS, WIDE)
        if PARTS > 1:
            turn_partials = partials_of_turn(
                partials_pointer, turn - first_turn, 5, BLOCK_ROWS, PARTS
            )
        x_row = x_pointer + offset(row, x_row_strides)
        dropout_kept_row = dropout_kept_pointer + offset(row, dropout_kept_row_strides)
        residual_row = residual_pointer + offset(row, residual_row_strides)
        grad_output_row = grad_output_pointer + offset(row, grad_output_row_strides)
        grad_residual_row = grad_residual_pointer + offset(row, grad_residual_row_strides)
        grad_x_row = grad_x_pointer + offset(row, grad_x_row_strides)

        if SWEEP == 0 or SWEEP == 1:
            layer_norm_total = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
            layer_norm_squares = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
            sum_1 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
            # Deviations are from the first block's mean, and corrected after the sweep.
            layer_norm_squares_about = tl.full((BLOCK_ROWS, 1), 0.0, COMPUTE)
            if first < end:
                column, is_column = block_of_columns(
                    first, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                )
                exists = is_row & is_column
                x = load(
                    x_row + offset(column, x_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
                dropout_kept = load(dropout_kept_row + offset(column, dropout_kept_column_strides), is_row, is_column, ONCE) != 0
                dropout = dropout_kept.to(COMPUTE)
                residual = load(
                    residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
                hidden = x * dropout * 1.1111111111111112 + residual
                layer_norm_squares_about = mean_of_block(
                    layer_norm_total + tl.where(exists, hidden, 0.0), in_first, PARTS
                )
            for block in range(first, end):
                column, is_column = block_of_columns(
                    block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                )
                exists = is_row & is_column
                x = load(
                    x_row + offset(column, x_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
                dropout_kept = load(dropout_kept_row + offset(column, dropout_kept_column_strides), is_row, is_column, ONCE) != 0
                dropout = dropout_kept.to(COMPUTE)
                residual = load(
                    residual_row + offset(column, residual_column_strides), is_row, is_column, ONCE
                ).to(COMPUTE)
                hidden = x * dropout * 1.1111111111111112 + residual
                grad_output = load(
                    grad_output_row + offset(column, grad_output_column_strides),
                    is_row,
                    is_column,
                    ONCE,
                ).to(COMPUTE)
                weight = load(
                    weight_pointer + offset(column, weight_column_strides), is_row, is_column
                ).to(COMPUTE)
                mul_30 = grad_output * weight
                layer_norm_total += tl.where(exists, hidden, 0.0)
                sum_1 += tl.where(exists, mul_30, 0.0)
                layer_norm_squares_terms = hidden - layer_norm_squares_about
                layer_norm_squares += tl.where(
                    exists, layer_norm_squares_terms * layer_norm_squares_terms, 0.0
                )
            layer_norm_squares = squares_about_mean(
                layer_norm_squares, layer_norm_total, layer_norm_squares_about, in_share, PARTS
            )
        else:
            layer_norm_total = load_partials(turn_partials, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
            layer_norm_squares = load_partials(turn_partials, 1, BLOCK_ROWS, PARTS, JOINED >= 1)
            sum_1 = load_partials(turn_partials, 2, BLOCK_ROWS, PARTS, JOINED >= 1)
            in_shares = load_partials(turn_partials, 4, BLOCK_ROWS, PARTS, JOINED >= 1)
            layer_norm_squares = joined_squares(layer_norm_squares, layer_norm_total, in_shares)
            in_share = of_rows(tl.sum(in_shares, 1))
        layer_norm_total = of_rows(tl.sum(layer_norm_total, 1))
        sum_1 = of_rows(tl.sum(sum_1, 1))
        if SWEEP == 1 or SWEEP == -1:
            store_partial(turn_partials, 0, layer_norm_total, BLOCK_ROWS, PARTS, SWEEP < 0)
            store_partial(turn_partials, 1, layer_norm_squares, BLOCK_ROWS, PARTS, SWEEP < 0)
            store_partial(turn_partials, 2, sum_1, BLOCK_ROWS, PARTS, SWEEP < 0)
            store_partial(turn_partials, 4, in_share, BLOCK_ROWS, PARTS, SWEEP < 0)
        else:
            layer_norm = math.rsqrt(layer_norm_squares / columns + 1e-05, ROUNDED)
            if SWEEP == 0 or SWEEP == 2:
                sum_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
                for block in range(first, end):
                    column, is_column = block_of_columns(
                        block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                    )
                    exists = is_row & is_column
                    grad_output = load(
                        grad_output_row + offset(column, grad_output_column_strides),
                        is_row,
                        is_column,
                        ONCE,
                    ).to(COMPUTE)
                    weight = load(
                        weight_pointer + offset(column, weight_column_strides), is_row, is_column
                    ).to(COMPUTE)
                    mul_30 = grad_output * weight
                    x = load(
                        x_row + offset(column, x_column_strides), is_row, is_column, ONCE
                    ).to(COMPUTE)
                    dropout_kept = load(dropout_kept_row + offset(column, dropout_kept_column_strides), is_row, is_column, ONCE) != 0
                    dropout = dropout_kept.to(COMPUTE)
                    residual = load(
                        residual_row + offset(column, residual_column_strides),
                        is_row,
                        is_column,
                        ONCE,
                    ).to(COMPUTE)
                    hidden = x * dropout * 1.1111111111111112 + residual
                    sub_23 = hidden - layer_norm_total / columns
                    mul_29 = sub_23 * layer_norm
                    sum_2 += tl.where(exists, mul_30 * mul_29, 0.0)
            else:
                sum_2 = load_partials(turn_partials, 3, BLOCK_ROWS, PARTS, JOINED >= 2)
            sum_2 = of_rows(tl.sum(sum_2, 1))
            if SWEEP == 2 or SWEEP == -2:
                store_partial(turn_partials, 3, sum_2, BLOCK_ROWS, PARTS, SWEEP < 0)
            else:
                for block in range(first, end):
                    column, is_column = block_of_columns(
                        block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
                    )
                    exists = is_row & is_column
                    grad_output = load(
                        grad_output_row + offset(column, grad_output_column_strides),
                        is_row,
                        is_column,
                        ONCE,
                    ).to(COMPUTE)
                    weight = load(
                        weight_pointer + offset(column, weight_column_strides), is_row, is_column
                    ).to(COMPUTE)
                    mul_30 = grad_output * weight
                    x = load(
                        x_row + offset(column, x_column_strides), is_row, is_column, ONCE
                    ).to(COMPUTE)
                    dropout_kept = load(dropout_kept_row + offset(column, dropout_kept_column_strides), is_row, is_column, ONCE) != 0
                    dropout = dropout_kept.to(COMPUTE)
                    residual = load(
                        residual_row + offset(column, residual_column_strides),
                        is_row,
                        is_column,
                        ONCE,
                    ).to(COMPUTE)
                    hidden = x * dropout * 1.1111111111111112 + residual
                    sub_23 = hidden - layer_norm_total / columns
                    mul_29 = sub_23 * layer_norm
                    mul_34 = layer_norm / columns * (mul_30 * columns - sum_1 - mul_29 * sum_2)
                    tl.store(
                        grad_residual_row + offset(column, grad_residual_column_strides),
                        mul_34.to(grad_residual_pointer.dtype.element_ty),
                        exists,
                    )
                    grad_x = mul_34 * 1.1111111111111112 * dropout
                    tl.store(
                        grad_x_row + offset(column, grad_x_column_strides),
                        grad_x.to(grad_x_pointer.dtype.element_ty),
                        exists,
                    )
                    grad_weight_sum = add_rows(
                        grad_weight_sum,
                        tl.where(exists, grad_output * mul_29, 0.0),
                        sums_pointer,
                        0,
                        2,
                        column,
                        column_sizes,
                        is_column,
                        turn > first_turn,
                        PARTS,
                    )
                    grad_bias_sum = add_rows(
                        grad_bias_sum,
                        tl.where(exists, grad_output, 0.0),
                        sums_pointer,
                        1,
                        2,
                        column,
                        column_sizes,
                        is_column,
                        turn > first_turn,
                        PARTS,
                    )
    if PARTS == 0:
        store_share(sums_pointer, 0, 2, grad_weight_sum, column_sizes)
        store_share(sums_pointer, 1, 2, grad_bias_sum, column_sizes)


@triton.jit(do_not_specialize=["shares"])
def dropped_residual_backward_sums(
    # read
    sums_pointer,
    # written
    grad_weight_pointer, grad_bias_pointer,
    # how many programs left sums; the sizes of the loops, what divides by them, and
    # the strides in them
    shares, column_sizes, column_divisors, grad_weight_column_strides, grad_bias_column_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, WIDE: tl.constexpr, BLOCK_SHARES: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_weight, grad_bias from the sums that the programs of
    dropped_residual_backward left. A program owns BLOCK_COLUMNS columns (width) and adds up
    BLOCK_SHARES programs' sums at a time. The second index of a program says which of the sums."""
    column, is_column = block_of_columns(
        tl.program_id(0), column_sizes, column_divisors, BLOCK_COLUMNS, False, WIDE
    )
    if tl.program_id(1) == 0:
        grad_weight = sum_of_shares(
            sums_pointer, 0, 2, shares, column_sizes, COMPUTE, BLOCK_SHARES, BLOCK_COLUMNS
        )
        tl.store(
            grad_weight_pointer + offset(column, grad_weight_column_strides),
            grad_weight.to(grad_weight_pointer.dtype.element_ty),
            is_column,
        )
    if tl.program_id(1) == 1:
        grad_bias = sum_of_shares(
            sums_pointer, 1, 2, shares, column_sizes, COMPUTE, BLOCK_SHARES, BLOCK_COLUMNS
        )
        tl.store(
            grad_bias_pointer + offset(column, grad_bias_column_strides),
            grad_bias.to(grad_bias_pointer.dtype.element_ty),
            is_column,
        )
