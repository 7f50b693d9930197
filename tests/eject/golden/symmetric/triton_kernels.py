"""symmetric in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import load, offset, tile


@triton.jit
def symmetric(
    # read
    x_pointer, x_2_pointer,
    # written
    output_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    x_strides, x_2_strides, output_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute output. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    x = load(x_pointer + offset(element, x_strides), is_row, is_column).to(COMPUTE)
    x_2 = load(x_2_pointer + offset(element, x_2_strides), is_row, is_column).to(COMPUTE)
    tl.store(
        output_pointer + offset(element, output_strides),
        math.tanh(x + x_2, ROUNDED).to(output_pointer.dtype.element_ty),
        is_row & is_column,
    )


@triton.jit
def symmetric_backward(
    # read
    grad_output_pointer, x_pointer, x_2_pointer, grad_output_2_pointer,
    # written
    grad_x_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    grad_output_strides, x_strides, x_2_strides, grad_output_2_strides, grad_x_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the columns
    are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    grad_output = load(
        grad_output_pointer + offset(element, grad_output_strides), is_row, is_column
    ).to(COMPUTE)
    x = load(x_pointer + offset(element, x_strides), is_row, is_column).to(COMPUTE)
    x_2 = load(x_2_pointer + offset(element, x_2_strides), is_row, is_column).to(COMPUTE)
    grad_output_2 = load(
        grad_output_2_pointer + offset(element, grad_output_2_strides), is_row, is_column
    ).to(COMPUTE)
    sub_8 = 1 - math.tanh(x + x_2, ROUNDED) * math.tanh(x + x_2, ROUNDED)
    sub_8_2 = 1 - math.tanh(x_2 + x, ROUNDED) * math.tanh(x_2 + x, ROUNDED)
    grad_x = grad_output * sub_8 + grad_output_2 * sub_8_2
    tl.store(
        grad_x_pointer + offset(element, grad_x_strides),
        grad_x.to(grad_x_pointer.dtype.element_ty),
        is_row & is_column,
    )
