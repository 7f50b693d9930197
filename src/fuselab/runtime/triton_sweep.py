"""Launches of Triton kernels that sweep over rows and columns (``runtime/sweep.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import torch

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.sweep import Sweep
from fuselab.runtime.triton_launch import launch

TILE = 1024  # elements of a tile of a kernel without reductions
ONE_BLOCK = 16384  # the most columns of a row that is kept in registers as a whole


class TritonSweeps:
    """The sweeping kernels of a package's ``triton_kernels.py``.

    A kernel with reductions is two functions: ``name``, for rows that fit in one block, and
    ``name_in_blocks``. A kernel without has only ``name``.
    """

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels = kernels

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        import triton.language as tl

        in_blocks = getattr(self._kernels, f"{name}_in_blocks", None)
        if in_blocks is None:
            down, across, warps = _tile(swept)
            programs = ceil_div(swept.rows.numel, down) * ceil_div(swept.columns.numel, across)
        else:
            down, across, warps = _rows(swept)
            programs = ceil_div(swept.rows.numel, down)
        fits = in_blocks is None or across >= swept.columns.numel
        launch(
            getattr(self._kernels, name) if fits else in_blocks,
            (programs,),
            *(tensor for tensor in swept.tensors if tensor is not None),
            *numbers,
            *swept.numbers(),
            num_warps=warps,
            COMPUTE=tl.float64 if compute == torch.float64 else tl.float32,
            ROW_LOOPS=len(swept.rows.sizes),
            COLUMN_LOOPS=len(swept.columns.sizes),
            WIDE=swept.is_wide,
            BLOCK_ROWS=down,
            BLOCK_COLUMNS=across,
        )


def _tile(swept: Sweep) -> tuple[int, int, int]:
    """Return rows, columns and warps of a tile. Where an operand is transposed, tiles are square,
    so that the cache lines that they touch are used whole."""
    transposed = any(strides[-1] > 1 for strides in swept.columns.strides)
    across = max(4, min(32 if transposed else TILE, power_of_two(max(swept.columns.numel, 1))))
    return TILE // across, across, 4


def _rows(swept: Sweep) -> tuple[int, int, int]:
    """Return rows, columns and warps of a block of a kernel with reductions. Where rows are
    neighbours in memory, a block has 64 of them, to read whole cache lines."""
    columns = power_of_two(max(swept.columns.numel, 1))
    if swept.rows_are_contiguous:
        down, across = 64, min(columns, 32)
    elif columns <= ONE_BLOCK:
        down, across = max(1, 1024 // columns), columns
    else:
        down, across = 1, 2048
    elements = down * across
    return down, across, 4 if elements <= 4096 else 8 if elements <= 8192 else 16
