"""activations in Triton, ejected from the PyTorch code in reference.py."""

import triton
import triton.language as tl

from fuselab.runtime import triton_math as math
from fuselab.runtime.triton_loops import larger, load, offset, smaller, tile


@triton.jit
def activations(
    # read
    x_pointer, y_pointer,
    # written
    output_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    x_strides, y_strides, output_strides,
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
    y = load(y_pointer + offset(element, y_strides), is_row, is_column).to(COMPUTE)
    softplus = tl.where(x > 20, x, math.log1p(math.exp(x, ROUNDED), ROUNDED))
    output = (
        softplus * tl.where(y > 0, y, math.expm1(y, ROUNDED))
        + x * smaller(larger(x + 3, 0), 6) / 6
    )
    tl.store(
        output_pointer + offset(element, output_strides),
        output.to(output_pointer.dtype.element_ty),
        is_row & is_column,
    )


@triton.jit
def activations_backward(
    # read
    x_pointer, grad_output_pointer, y_pointer,
    # written
    grad_x_pointer, grad_y_pointer,
    # the rows and columns, the sizes of the loops, outermost first, what divides by
    # them, and the strides of each tensor in them
    counts, sizes, divisors,
    x_strides, grad_output_strides, y_strides, grad_x_strides, grad_y_strides,
    # chosen by the launcher
    COMPUTE: tl.constexpr, ROUNDED: tl.constexpr, WIDE: tl.constexpr,
    COLUMN_LOOPS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute grad_x, grad_y. A program owns a tile of BLOCK_ROWS x BLOCK_COLUMNS elements; the
    columns are the last COLUMN_LOOPS loops, the rows all others."""
    element, is_row, is_column = tile(
        sizes, divisors, counts, COLUMN_LOOPS, BLOCK_ROWS, BLOCK_COLUMNS, WIDE
    )
    x = load(x_pointer + offset(element, x_strides), is_row, is_column).to(COMPUTE)
    grad_output = load(
        grad_output_pointer + offset(element, grad_output_strides), is_row, is_column
    ).to(COMPUTE)
    softplus = x > 20
    y = load(y_pointer + offset(element, y_strides), is_row, is_column).to(COMPUTE)
    mul_17 = grad_output * tl.where(y > 0, y, math.expm1(y, ROUNDED))
    softplus_2 = math.exp(x, ROUNDED)
    mul_22 = grad_output * tl.where(softplus, x, math.log1p(softplus_2, ROUNDED))
    where_3 = tl.where(x <= (-3), 0.0, tl.where(x < 3, grad_output * (x / 3 + 0.5), grad_output))
    where_5 = tl.where(softplus, mul_17, mul_17 * softplus_2 / (softplus_2 + 1.0))
    grad_x = where_3 + where_5
    tl.store(
        grad_x_pointer + offset(element, grad_x_strides),
        grad_x.to(grad_x_pointer.dtype.element_ty),
        is_row & is_column,
    )
    grad_y = tl.where(y <= 0, mul_22 * math.exp(y, ROUNDED), mul_22)
    tl.store(
        grad_y_pointer + offset(element, grad_y_strides),
        grad_y.to(grad_y_pointer.dtype.element_ty),
        is_row & is_column,
    )
