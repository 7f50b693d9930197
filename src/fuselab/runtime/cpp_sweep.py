"""Launches of C++ kernels that sweep over rows and columns (``runtime/sweep.py``)."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import torch

from fuselab.runtime.cpp_source import CppSource, i64
from fuselab.runtime.parameters import Struct
from fuselab.runtime.sweep import Sweep

# Narrower rows are computed side by side, one in each lane of a vector.
NARROW = 32
# Rows that are fewer in a run are not.
FEW = 8
# Shorter runs of columns leave lanes of a vector empty. Copies that make them longer are small with
# at most half of a result's elements.
SHORT, SHARE = 16, 2

CPP_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.bool: "bool",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}


class CppSweeps:
    """The sweeping kernels of a package's ``cpu_kernels.cpp``, written with ``cpu_sweep.h``.

    Args:
        windows: the names of the kernels in which each element walks over its columns itself.
    """

    def __init__(self, path: str | os.PathLike[str], windows: Sequence[str] = ()) -> None:
        self._source = CppSource(path)
        self.windows = frozenset(windows)

    @property
    def path(self) -> Path:
        """The file that has the kernels."""
        return self._source.path

    def run(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int] = ()
    ) -> None:
        """Launch the kernel ``name`` over the sweep's loops.

        Args:
            compute: the dtype of the arithmetic, float32 or float64.
            numbers: sizes that the kernel computes with.
        """
        if name in self.windows:
            swept = swept.over_elements()
        swept = swept.with_rows_apart()
        self._launch(name, swept, compute, numbers)
        swept.copy_back()

    def run_each(self, name: str, sweeps: Sequence[Sweep], compute: torch.dtype) -> None:
        """Launch a kernel for each of the sweeps."""
        for swept in sweeps:
            self.run(name, swept, compute)

    def _launch(
        self, name: str, swept: Sweep, compute: torch.dtype, numbers: Sequence[int]
    ) -> None:
        swept.order_rows_by_result()
        swept = swept.with_long_columns(SHORT, SHARE)
        if _runs_are_short(swept):
            swept.put_longest_rows_innermost()
        tensors = [tensor for tensor in swept.tensors if tensor is not None]
        lane = "row" if _lanes_are_rows(swept) else "column"
        types = ", ".join([CPP_TYPES[compute], *(CPP_TYPES[tensor.dtype] for tensor in tensors)])
        loops = swept.numbers()
        self._source.launch(
            f"kernels::{name}<Lane::{lane}, {types}>",
            (
                *tensors,
                *map(i64, (*numbers, *swept.steps)),
                Struct(struct.pack(f"{len(loops)}q", *loops)),
            ),
        )


def _runs_are_short(swept: Sweep) -> bool:
    """Return whether neither rows nor columns fill the lanes of a vector, as those of the products
    of many small matrices, and the results have no columns whose order in memory would count."""
    results = swept.columns.strides[swept.read :]
    is_small = swept.rows.sizes[-1] < FEW and swept.columns.numel < FEW
    return is_small and max(swept.rows.sizes) >= NARROW and not any(map(any, results))


def _lanes_are_rows(swept: Sweep) -> bool:
    """Return whether the lanes of a vector are neighbouring rows, not neighbouring columns.

    They are where rows are narrow, and where an operand's rows are neighbours in memory. Then every
    operand is read fast: one whose columns are neighbours is transposed on the way. A run of fewer
    rows than ``FEW`` would leave most lanes empty, and so would one of not much more rows than a
    run has columns.
    """
    rows, columns = swept.rows, swept.columns
    if rows.sizes[-1] < FEW <= columns.sizes[-1]:
        return False
    if columns.numel < NARROW and rows.sizes[-1] >= min(NARROW, 2 * columns.sizes[-1]):
        return True
    steps = zip(rows.strides, columns.strides, strict=True)
    return any(along_rows[-1] == 1 < along_columns[-1] for along_rows, along_columns in steps)
