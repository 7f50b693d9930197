"""input * input in Triton, and its gradient 2 grad input. Every element is read once and written
once: memory is the limit.

A program of a flat kernel owns BLOCK consecutive elements; the start is 64-bit and the offsets from
it are 32-bit, so that any size is right at no extra cost. A program of a strided kernel owns
BLOCK_ROWS x BLOCK_COLUMNS elements of a nest of up to five loops.
"""

import triton
import triton.language as tl

from fuselab.ops._shared.triton_nest import offset_of, tile_of_nest, unspecialized


@triton.jit
def _square_tile(input, output, offset, mask, COMPUTE: tl.constexpr):
    x = tl.load(input + offset, mask).to(COMPUTE)
    tl.store(output + offset, (x * x).to(output.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["numel"])
def square(
    input, output,  # (numel,), dense in one order
    numel,
    COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    # A mask that may end anywhere makes every access scalar, so only the last program has one.
    if start + BLOCK <= numel:
        _square_tile(input + start, output + start, offset, None, COMPUTE)
    else:
        _square_tile(input + start, output + start, offset, offset < numel - start, COMPUTE)


@triton.jit(**unspecialized("input"))
def square_strided(
    input, output,  # output: dense, in memory order; input by its strides
    rows, size_1, size_2, size_3, size_4,
    input_0, input_1, input_2, input_3, input_4,
    COMPUTE: tl.constexpr, MATRIX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_nest(size_3, size_4, rows, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    offset = offset_of(
        row, column, size_1, size_2, size_3, input_0, input_1, input_2, input_3, input_4, MATRIX
    )
    x = tl.load(input + offset, mask).to(COMPUTE)
    tl.store(output + row * size_4 + column, (x * x).to(output.dtype.element_ty), mask)


@triton.jit
def _backward_tile(grad, input, grad_input, offset, mask, COMPUTE: tl.constexpr):
    slope = 2 * tl.load(input + offset, mask).to(COMPUTE)
    gradient = tl.load(grad + offset, mask).to(COMPUTE) * slope
    tl.store(grad_input + offset, gradient.to(grad_input.dtype.element_ty), mask)


@triton.jit(do_not_specialize=["numel"])
def square_backward(
    grad, input, grad_input,  # (numel,), all dense in one order
    numel,
    COMPUTE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    offset = tl.arange(0, BLOCK)
    if start + BLOCK <= numel:
        _backward_tile(grad + start, input + start, grad_input + start, offset, None, COMPUTE)
    else:
        mask = offset < numel - start
        _backward_tile(grad + start, input + start, grad_input + start, offset, mask, COMPUTE)


@triton.jit(**unspecialized("grad", "input"))
def square_backward_strided(
    grad, input, grad_input,  # grad_input: dense, in memory order; the others by their strides
    rows, size_1, size_2, size_3, size_4,
    grad_0, grad_1, grad_2, grad_3, grad_4,
    input_0, input_1, input_2, input_3, input_4,
    COMPUTE: tl.constexpr, MATRIX: tl.constexpr, WIDE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    row, column, mask = tile_of_nest(size_3, size_4, rows, BLOCK_ROWS, BLOCK_COLUMNS, WIDE)
    of_grad = offset_of(
        row, column, size_1, size_2, size_3, grad_0, grad_1, grad_2, grad_3, grad_4, MATRIX
    )
    of_input = offset_of(
        row, column, size_1, size_2, size_3, input_0, input_1, input_2, input_3, input_4, MATRIX
    )
    gradient = tl.load(grad + of_grad, mask).to(COMPUTE)
    gradient *= 2 * tl.load(input + of_input, mask).to(COMPUTE)
    tl.store(grad_input + row * size_4 + column, gradient.to(grad_input.dtype.element_ty), mask)
