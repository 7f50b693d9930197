"""Tensor maps: descriptions of a matrix for Hopper's copy engine (TMA), which copies it in boxes.

A kernel takes one by value, as ``const __grid_constant__`` of a struct of 128 bytes aligned to 64.
It contains the matrix's address, so the launcher makes it at every launch, and a launch plan keeps
only its layout. It needs an address that is a multiple of 16, which is in every plan's key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import TensorMap

# CUtensorMapDataType, rows, columns, bytes from row to row, rows and columns of a box.
Layout = tuple[int, int, int, int, int, int]

_DTYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_VECTOR_BYTES = 16


def why_not(matrix: Tensor) -> str | None:
    """Return the reason why TMA cannot read this matrix of two dimensions, or None."""
    rows, columns = matrix.shape
    if matrix.dtype not in _DTYPES:
        return "it takes float16 and bfloat16"
    if matrix.data_ptr() % _VECTOR_BYTES:
        return "its first element is not at a multiple of 16 bytes"
    if columns > 1 and matrix.stride(1) != 1:
        return "its rows are not contiguous"
    if rows > 1 and matrix.stride(0) * matrix.element_size() % _VECTOR_BYTES:
        return "its rows are not a multiple of 16 bytes apart"
    if rows > 1 and matrix.stride(0) < columns:
        return "its rows overlap"
    if max(rows, columns) >= 2**30:
        return "it has 2^30 rows or columns"
    return None


def tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> TensorMap:
    """Return the map of a CUDA matrix that passes ``why_not``, for boxes of at most 256 rows and
    128 bytes of columns, swizzled by 128 bytes in shared memory; elements beyond the edges are 0.

    The launch raises BuildError if the driver is older than tensor maps (12.0), LaunchError if it
    refuses the matrix.
    """
    (rows, columns), size = matrix.shape, matrix.element_size()
    # A single row may have any stride; the map's must be a multiple of 16 bytes and cover the row.
    pitch = matrix.stride(0) * size if rows > 1 else ceil_div(columns * size, 16) * 16
    layout: Layout = (_DTYPES[matrix.dtype], rows, columns, pitch, box_rows, box_columns)
    return TensorMap((matrix, layout))
