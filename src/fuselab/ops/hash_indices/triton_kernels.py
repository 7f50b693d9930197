"""Hash ids by their modulus, in Triton.

A program takes BLOCK ids in the output's order; every id is read and every index written once.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_modulus import modulus


@triton.jit(debug=True, do_not_specialize=["numel", "row_stride"])
def hash_ids(
    ids,  # (rows, columns), by its strides
    cardinalities,  # (columns,) int64
    output,  # (rows, columns) int64, contiguous
    numel,
    columns,
    row_stride,
    column_stride,
    BLOCK: tl.constexpr,
):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < numel
    rows, column = positions // columns, positions % columns
    values = tl.load(ids + rows * row_stride + column * column_stride, mask=inside, other=0)
    bounds = tl.load(cardinalities + column, mask=inside, other=1)
    tl.device_assert(bounds > 0, "hash_indices: a cardinality is below 1")
    tl.store(output + positions, modulus(values.to(tl.int64), bounds), mask=inside)
