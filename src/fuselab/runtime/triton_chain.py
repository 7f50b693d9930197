"""Device functions of Triton kernels that compute a chain of small matrix products: a program owns
rows from the first product to the last (``runtime/chain.py``)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_weight(
    pointer, first, depth, depth_step, column, is_column, column_step, BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Load ``BLOCK`` rows of a weight, from row ``first`` on, at some of its columns; zeros where
    it ends. It has ``depth`` rows, over which a product sums."""
    row = first + tl.arange(0, BLOCK)[:, None]
    is_inside = (row < depth) & is_column
    if WIDE:
        row = row.to(tl.int64)
    return tl.load(pointer + (row * depth_step + column * column_step), is_inside, 0.0)


@triton.jit
def multiply(values, is_column, weight, PRECISION: tl.constexpr):
    """Return the product of a tile of rows with a block of a weight, in float32. The tile is
    rounded to the weight's dtype, as what eager PyTorch stores before a product is."""
    values = tl.where(is_column, values, 0.0).to(weight.dtype)
    return tl.dot(values, weight, input_precision=PRECISION)
