"""The Triton kernel that adds rows at positions, by atomic additions."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.triton_launch import launch

TILE = 1024  # elements that a program adds
MOST_COLUMNS = 256  # of them along a row
_INT32_MAX = 2**31 - 1


@triton.jit
def add_rows(
    base_pointer, index_pointer, values_pointer, count, size, inner, outer_base, outer_values,
    WIDE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Add rows of ``inner`` values to those rows of ``base`` at whose positions they belong. A
    program owns BLOCK_ROWS x BLOCK_COLUMNS values of one of the outer turns."""
    row = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.program_id(1) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    turn = tl.program_id(2)
    if WIDE:
        row, column, turn = row.to(tl.int64), column.to(tl.int64), turn.to(tl.int64)
    position = tl.load(index_pointer + row, row < count, size)
    exists = (position >= 0) & (position < size) & (column < inner)
    if not WIDE:
        position = position.to(tl.int32)
    values = tl.load(values_pointer + turn * outer_values + row * inner + column, exists, 0)
    tl.atomic_add(
        base_pointer + turn * outer_base + position * inner + column,
        values.to(base_pointer.dtype.element_ty),
        exists,
        sem="relaxed",
    )


def launch_add_rows(base: Tensor, dim: int, index: Tensor, values: Tensor) -> None:
    """Add ``values`` to ``base`` at positions along ``dim``, in any order; positions outside of it
    are left out. ``values`` has one dimension, of as many elements as ``index``, in the place of
    ``dim``. All are contiguous."""
    outer, inner = base.shape[:dim].numel(), base.shape[dim + 1 :].numel()
    count, size = index.numel(), base.shape[dim]
    across = min(MOST_COLUMNS, power_of_two(max(1, inner)))
    down = TILE // across
    launch(
        add_rows,
        (ceil_div(count, down), ceil_div(inner, across), outer),
        base,
        index,
        values,
        count,
        size,
        inner,
        size * inner,
        count * inner,
        WIDE=max(base.numel(), values.numel() + TILE * max(1, inner)) > _INT32_MAX,
        BLOCK_ROWS=down,
        BLOCK_COLUMNS=across,
        num_warps=4,
    )
