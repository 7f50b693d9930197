"""A sample's vectors end to end, and the way back, in Triton.

Tiling: a program owns ROWS x COLUMNS of the joined row, of which every element is read once and
written once. Strides count elements and may be 0; ``output``, ``grad_dense`` and
``grad_embeddings`` are contiguous, and so is every vector of the inputs.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def forward(
    dense,  # (rows, width)
    embeddings,  # (rows, columns / width - 1, width)
    output,  # (rows, columns)
    rows,
    width,
    columns,
    dense_stride,
    batch_stride,
    vector_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """output[b] = dense[b], then the embeddings of b."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    table = (column // width - 1).to(tl.int64)
    first = tl.load(dense + row * dense_stride + column, mask=mask & (column < width), other=0.0)
    others = tl.load(
        embeddings + row * batch_stride + table * vector_stride + column % width,
        mask=mask & (column >= width),
        other=0.0,
    )
    tl.store(output + row * columns + column, tl.where(column < width, first, others), mask=mask)


@triton.jit(do_not_specialize=["rows"])
def backward(
    grad_output,  # (rows, columns)
    grad_dense,  # (rows, width), or None
    grad_embeddings,  # (rows, columns - width), or None
    rows,
    width,
    columns,
    grad_stride,
    column_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The upstream gradient's columns, each to where it came from."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < columns)
    place = row * grad_stride + column.to(tl.int64) * column_stride
    value = tl.load(grad_output + place, mask=mask, other=0.0)
    if grad_dense is not None:
        tl.store(grad_dense + row * width + column, value, mask=mask & (column < width))
    if grad_embeddings is not None:
        tl.store(
            grad_embeddings + row * (columns - width) + column - width,
            value,
            mask=mask & (column >= width),
        )
