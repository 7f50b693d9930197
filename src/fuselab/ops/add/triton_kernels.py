"""input + other in Triton. Every element is read once and written once: memory is the limit."""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_nest import offset_of, tile_of_nest, unspecialized


@triton.jit
def _add_tile(input, other, output, offset, mask, COMPUTE: tl.constexpr):
    total = tl.load(input + offset, mask).to(COMPUTE) + tl.load(other + offset, mask).to(COMPUTE)
    tl.store(output + offset, total.to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["numel"])
def add(
    input, other, output,  # (numel,), all dense in one order
    numel,
    COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add BLOCK consecutive elements per program. The start is 64-bit and the offsets from it are
    32-bit, so that any size is right at no extra cost."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    # A mask that may end anywhere makes every access scalar, so only the last program has one.
    if start + BLOCK <= numel:
        _add_tile(input + start, other + start, output + start, offset, None, COMPUTE)
    else:
        mask = offset < numel - start
        _add_tile(input + start, other + start, output + start, offset, mask, COMPUTE)


@triton.jit(**unspecialized("input", "other"))
def add_strided(
    input, other, output,  # output: dense, in memory order; the others by strides, 0 if broadcast
    rows, size_1, size_2, size_3, size_4,
    input_0, input_1, input_2, input_3, input_4,
    other_0, other_1, other_2, other_3, other_4,
    COMPUTE: tl.constexpr, MATRIX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add BLOCK_ROWS x BLOCK_COLUMNS elements of a nest of up to five loops per program."""
    row, column, mask = tile_of_nest(size_3, size_4, rows, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    of_input = offset_of(
        row, column, size_1, size_2, size_3, input_0, input_1, input_2, input_3, input_4, MATRIX
    )
    of_other = offset_of(
        row, column, size_1, size_2, size_3, other_0, other_1, other_2, other_3, other_4, MATRIX
    )
    total = tl.load(input + of_input, mask).to(COMPUTE)
    total += tl.load(other + of_other, mask).to(COMPUTE)
    tl.store(output + row * size_4 + column, total.to(output.dtype.element_ty), mask)
