"""smooth_loss in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

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
def smooth_loss(
    # read
    prediction_pointer, target_pointer,
    # written
    output_pointer,
    # what programs that share rows leave for the next sweep
    partials_pointer,
    # the sizes of the loops, outermost first, what divides by them, and the strides
    # of each tensor in them
    row_sizes, row_divisors, column_sizes, column_divisors,
    prediction_column_strides, target_column_strides, output_row_strides,
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
    columns = numel(column_sizes)

    if SWEEP == 0 or SWEEP == 1:
        huber_loss_2 = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
        for block in range(first, end):
            column, is_column = block_of_columns(
                block, column_sizes, column_divisors, BLOCK_COLUMNS, NESTED_COLUMNS, WIDE
            )
            exists = is_row & is_column
            prediction = load(
                prediction_pointer + offset(column, prediction_column_strides),
                is_row,
                is_column,
                ONCE,
            ).to(COMPUTE)
            target = load(
                target_pointer + offset(column, target_column_strides), is_row, is_column, ONCE
            ).to(COMPUTE)
            huber_loss = tl.abs(prediction - target)
            huber_loss_2 += tl.where(
                exists,
                tl.where(huber_loss < 1.0, huber_loss * 0.5 * huber_loss, huber_loss - 0.5),
                0.0,
            )
    else:
        huber_loss_2 = load_partials(partials_pointer, 0, BLOCK_ROWS, PARTS, JOINED >= 1)
    huber_loss_2 = of_rows(tl.sum(huber_loss_2, 1))
    if SWEEP == 1 or SWEEP == -1:
        store_partial(partials_pointer, 0, huber_loss_2, BLOCK_ROWS, PARTS, SWEEP < 0)
        return
    output = huber_loss_2 / columns
    tl.store(
        output_pointer + offset(row, output_row_strides),
        output.to(output_pointer.dtype.element_ty),
        is_row,
    )


@triton.jit(do_not_specialize=["width_count", "length_count"])
def smooth_loss_backward(
    # read
    prediction_pointer, target_pointer, grad_output_pointer,
    # written
    grad_prediction_pointer, grad_target_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    width_count, length_count, counts, sizes, divisors,
    prediction_strides, target_strides, grad_prediction_strides, grad_target_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_prediction, grad_target. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS
    elements; the columns are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    prediction = load(
        prediction_pointer + offset(element, prediction_strides), is_row, is_column
    ).to(COMPUTE)
    target = load(target_pointer + offset(element, target_strides), is_row, is_column).to(COMPUTE)
    sub_2 = prediction - target
    grad_output = tl.load(grad_output_pointer).to(COMPUTE)
    mul_tensor = tl.cast(width_count, COMPUTE) * tl.cast(length_count, COMPUTE)
    true_divide_tensor = 1.0 / mul_tensor
    mul_10 = grad_output * (-1 * true_divide_tensor)
    mul_12 = grad_output * true_divide_tensor
    sub_3 = target - prediction
    where_1 = tl.where(sub_2 > 1.0, mul_12, sub_2 * true_divide_tensor * grad_output)
    grad_prediction = tl.where(sub_2 < (-1.0), mul_10, where_1)
    tl.store(
        grad_prediction_pointer + offset(element, grad_prediction_strides),
        grad_prediction.to(grad_prediction_pointer.dtype.element_ty),
        is_row & is_column,
    )
    where_3 = tl.where(sub_3 > 1.0, mul_12, sub_3 * true_divide_tensor * grad_output)
    grad_target = tl.where(sub_3 < (-1.0), mul_10, where_3)
    tl.store(
        grad_target_pointer + offset(element, grad_target_strides),
        grad_target.to(grad_target_pointer.dtype.element_ty),
        is_row & is_column,
    )
