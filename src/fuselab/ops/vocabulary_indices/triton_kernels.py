"""Vocabulary look-up in Triton: a binary search in each column's sorted keys.

A program searches BLOCK ids at once, in as many steps as the largest column could need. Every id is
read and every index written once.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["numel", "row_stride"])
def look_up(
    ids,  # (rows, columns), by its strides
    keys,  # (K,) int64, ascending within a column
    slots,  # (K,) int64
    offsets,  # (columns + 1,) int64
    output,  # (rows, columns) int64, contiguous
    numel,
    columns,
    row_stride,
    column_stride,
    STEPS: tl.constexpr,  # bits of K
    BLOCK: tl.constexpr,
):
    positions = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = positions < numel
    rows, column = positions // columns, positions % columns
    source = ids + rows * row_stride + column * column_stride
    values = tl.load(source, mask=inside, other=0).to(tl.int64)
    begin = tl.load(offsets + column, mask=inside, other=0)
    end = tl.load(offsets + column + 1, mask=inside, other=0)
    low = begin
    high = end
    for _ in range(STEPS):
        middle = (low + high) // 2
        searching = low < high
        below = tl.load(keys + middle, mask=searching, other=0) < values
        low = tl.where(searching & below, middle + 1, low)
        high = tl.where(searching & (below == 0), middle, high)
    found = low < end
    known = found & (tl.load(keys + low, mask=found, other=0) == values)
    indices = tl.where(known, tl.load(slots + low, mask=known, other=0), end - begin)
    tl.store(output + positions, indices, mask=inside)
