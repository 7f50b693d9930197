"""Device functions of Triton kernels that sweep over rows and columns (``runtime/sweep.py``)."""

# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def row_offset(
    row, size_1, size_2, size_3, stride_0, stride_1, stride_2, stride_3, LOOPS: tl.constexpr
):  # fmt: skip
    """Return the offset of a row in a tensor whose rows are ``LOOPS`` nested loops, the inner three
    of ``size_1``, ``size_2`` and ``size_3``."""
    if LOOPS == 1:
        return row * stride_3
    offset = row % size_3 * stride_3
    row = row // size_3
    if LOOPS == 2:
        return offset + row * stride_2
    offset += row % size_2 * stride_2
    row = row // size_2
    if LOOPS == 3:
        return offset + row * stride_1
    return offset + row % size_1 * stride_1 + row // size_1 * stride_0


@triton.jit
def column_offset(column, size_1, size_2, stride_0, stride_1, stride_2, LOOPS: tl.constexpr):
    """Return the offset of a column in a tensor whose columns are ``LOOPS`` nested loops, the inner
    two of ``size_1`` and ``size_2``."""
    if LOOPS == 1:
        return column * stride_2
    offset = column % size_2 * stride_2
    column = column // size_2
    if LOOPS == 2:
        return offset + column * stride_1
    return offset + column % size_1 * stride_1 + column // size_1 * stride_0


@triton.jit
def larger(a, b):
    """Return the larger of two values, NaN if one is NaN, as PyTorch does."""
    return tl.where((a != a) | (a > b), a, b)


@triton.jit
def smaller(a, b):
    """Return the smaller of two values, NaN if one is NaN, as PyTorch does."""
    return tl.where((a != a) | (a < b), a, b)


@triton.jit
def product(a, b):
    """Return the product of two values."""
    return a * b
