"""The concatenation of a sample's vectors in Triton.

A program owns ROWS x COLUMNS of the joined row; every element is read once and written once.
Strides count elements and may be 0. ``output`` is contiguous, and so is every vector of the inputs.
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
    """Write output[b] = dense[b], then the embeddings of b."""
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
