"""smooth_loss in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime.triton_loops import column_offset, row_offset


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "prediction_stride_0",
        "prediction_stride_1", "prediction_stride_4", "target_stride_0", "target_stride_1",
        "target_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["prediction_stride_6", "target_stride_6", "output_stride_6"],
)  # fmt: skip
def smooth_loss(
    # read
    prediction_pointer, target_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    prediction_stride_0, prediction_stride_1, prediction_stride_2, prediction_stride_3,
    prediction_stride_4, prediction_stride_5, prediction_stride_6,
    target_stride_0, target_stride_1, target_stride_2, target_stride_3, target_stride_4,
    target_stride_5, target_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (the whole) with all of their columns
    (length, width), which fit in one block, so that every element is read once."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    prediction_offset = column_offset(
        column, column_size_1, column_size_2, prediction_stride_4, prediction_stride_5,
        prediction_stride_6, COLUMN_LOOPS
    )
    prediction = tl.load(prediction_pointer + prediction_offset, column < columns).to(COMPUTE)
    target_offset = column_offset(
        column, column_size_1, column_size_2, target_stride_4, target_stride_5, target_stride_6,
        COLUMN_LOOPS
    )
    target = tl.load(target_pointer + target_offset, column < columns).to(COMPUTE)
    huber_loss = tl.abs(prediction - target)
    huber_loss_2 = tl.sum(tl.where(exists, tl.where(huber_loss < 1.0, huber_loss * 0.5 * huber_loss, huber_loss - 0.5), 0.0), 1)[:, None]
    output = huber_loss_2 / columns
    tl.store(output_pointer + row, output.to(output_pointer.dtype.element_ty), row < rows)


@triton.jit(
    do_not_specialize=["rows", "row_size_1", "row_size_2", "column_size_1", "prediction_stride_0",
        "prediction_stride_1", "prediction_stride_4", "target_stride_0", "target_stride_1",
        "target_stride_4", "output_stride_0", "output_stride_1", "output_stride_4"],
    do_not_specialize_on_alignment=["prediction_stride_6", "target_stride_6", "output_stride_6"],
)  # fmt: skip
def smooth_loss_in_blocks(
    # read
    prediction_pointer, target_pointer,
    # written
    output_pointer,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    prediction_stride_0, prediction_stride_1, prediction_stride_2, prediction_stride_3,
    prediction_stride_4, prediction_stride_5, prediction_stride_6,
    target_stride_0, target_stride_1, target_stride_2, target_stride_3, target_stride_4,
    target_stride_5, target_stride_6,
    output_stride_0, output_stride_1, output_stride_2, output_stride_3, output_stride_4,
    output_stride_5, output_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns BLOCK_ROWS rows (the whole) and sweeps once over their
    columns (length, width), BLOCK_COLUMNS at a time."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    huber_loss_2_so_far = tl.full((BLOCK_ROWS, BLOCK_COLUMNS), 0.0, COMPUTE)
    for start in range(0, columns, BLOCK_COLUMNS):
        column = start + tl.arange(0, BLOCK_COLUMNS)[None, :]
        if WIDE:
            column = column.to(tl.int64)
        exists = (row < rows) & (column < columns)
        prediction_offset = column_offset(
            column, column_size_1, column_size_2, prediction_stride_4, prediction_stride_5,
            prediction_stride_6, COLUMN_LOOPS
        )
        prediction = tl.load(prediction_pointer + prediction_offset, column < columns).to(COMPUTE)
        target_offset = column_offset(
            column, column_size_1, column_size_2, target_stride_4, target_stride_5, target_stride_6,
            COLUMN_LOOPS
        )
        target = tl.load(target_pointer + target_offset, column < columns).to(COMPUTE)
        huber_loss = tl.abs(prediction - target)
        huber_loss_2_so_far = huber_loss_2_so_far + tl.where(
            exists, tl.where(huber_loss < 1.0, huber_loss * 0.5 * huber_loss, huber_loss - 0.5), 0.0
        )
    huber_loss_2 = tl.sum(huber_loss_2_so_far, 1)[:, None]
    output = huber_loss_2 / columns
    tl.store(output_pointer + row, output.to(output_pointer.dtype.element_ty), row < rows)


@triton.jit(
    do_not_specialize=["width_count", "length_count", "rows", "row_size_1", "row_size_2",
        "column_size_1", "prediction_stride_0", "prediction_stride_1", "prediction_stride_4",
        "target_stride_0", "target_stride_1", "target_stride_4", "grad_output_stride_0",
        "grad_output_stride_1", "grad_output_stride_4", "grad_prediction_stride_0",
        "grad_prediction_stride_1", "grad_prediction_stride_4", "grad_target_stride_0",
        "grad_target_stride_1", "grad_target_stride_4"],
    do_not_specialize_on_alignment=["prediction_stride_6", "target_stride_6",
        "grad_output_stride_6", "grad_prediction_stride_6", "grad_target_stride_6"],
)  # fmt: skip
def smooth_loss_backward(
    # read
    prediction_pointer, target_pointer, grad_output_pointer,
    # written
    grad_prediction_pointer, grad_target_pointer,
    width_count, length_count,
    rows, row_size_1, row_size_2, row_size_3, columns, column_size_1, column_size_2,
    prediction_stride_0, prediction_stride_1, prediction_stride_2, prediction_stride_3,
    prediction_stride_4, prediction_stride_5, prediction_stride_6,
    target_stride_0, target_stride_1, target_stride_2, target_stride_3, target_stride_4,
    target_stride_5, target_stride_6,
    grad_output_stride_0, grad_output_stride_1, grad_output_stride_2, grad_output_stride_3,
    grad_output_stride_4, grad_output_stride_5, grad_output_stride_6,
    grad_prediction_stride_0, grad_prediction_stride_1, grad_prediction_stride_2,
    grad_prediction_stride_3, grad_prediction_stride_4, grad_prediction_stride_5,
    grad_prediction_stride_6,
    grad_target_stride_0, grad_target_stride_1, grad_target_stride_2, grad_target_stride_3,
    grad_target_stride_4, grad_target_stride_5, grad_target_stride_6,
    COMPUTE: tl.constexpr, ROW_LOOPS: tl.constexpr, COLUMN_LOOPS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_prediction, grad_target. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS
    elements; the columns are the innermost loop, the rows all others."""
    across = tl.cdiv(columns, BLOCK_COLUMNS)
    tile_row, tile_column = tl.program_id(0) // across, tl.program_id(0) % across
    row = tile_row * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    if WIDE:
        row = tile_row.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tile_column * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    if WIDE:
        column = tile_column.to(tl.int64) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    exists = (row < rows) & (column < columns)
    prediction_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, prediction_stride_0, prediction_stride_1,
        prediction_stride_2, prediction_stride_3, ROW_LOOPS
    )
    prediction_offset = prediction_row + column * prediction_stride_6
    prediction = tl.load(prediction_pointer + prediction_offset, exists).to(COMPUTE)
    target_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, target_stride_0, target_stride_1, target_stride_2,
        target_stride_3, ROW_LOOPS
    )
    target = tl.load(target_pointer + target_row + column * target_stride_6, exists).to(COMPUTE)
    sub_2 = prediction - target
    grad_output = tl.load(grad_output_pointer).to(COMPUTE)
    true_divide_tensor = 1.0 / (width_count * length_count)
    mul_10 = grad_output * (-1 * true_divide_tensor)
    mul_12 = grad_output * true_divide_tensor
    sub_3 = target - prediction
    where_1 = tl.where(sub_2 > 1.0, mul_12, sub_2 * true_divide_tensor * grad_output)
    grad_prediction_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_prediction_stride_0, grad_prediction_stride_1,
        grad_prediction_stride_2, grad_prediction_stride_3, ROW_LOOPS
    )
    grad_prediction_offset = grad_prediction_row + column * grad_prediction_stride_6
    grad_prediction = tl.where(sub_2 < (-1.0), mul_10, where_1)
    tl.store(
        grad_prediction_pointer + grad_prediction_offset,
        grad_prediction.to(grad_prediction_pointer.dtype.element_ty),
        exists,
    )
    where_3 = tl.where(sub_3 > 1.0, mul_12, sub_3 * true_divide_tensor * grad_output)
    grad_target_row = row_offset(
        row, row_size_1, row_size_2, row_size_3, grad_target_stride_0, grad_target_stride_1,
        grad_target_stride_2, grad_target_stride_3, ROW_LOOPS
    )
    grad_target_offset = grad_target_row + column * grad_target_stride_6
    grad_target = tl.where(sub_3 < (-1.0), mul_10, where_3)
    tl.store(
        grad_target_pointer + grad_target_offset,
        grad_target.to(grad_target_pointer.dtype.element_ty),
        exists,
    )
