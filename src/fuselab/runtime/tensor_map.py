"""Tensor maps: what tells Hopper's copy engine where a matrix lies and how to cut it into boxes.

A kernel takes one by value, as ``const __grid_constant__`` of a struct of 128 bytes aligned to 64.
It holds the matrix's address, so it is asked for at every launch (such a launch is never a plan).
"""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch
from torch import Tensor

from fuselab.errors import BuildError, LaunchError
from fuselab.runtime import cuda_driver
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import Struct

BYTES, _ALIGNMENT = 128, 64
_DTYPES = {torch.float16: 6, torch.bfloat16: 9}  # CUtensorMapDataType
_INTERLEAVE_NONE, _SWIZZLE_128_BYTES, _PROMOTE_TO_256_BYTES, _ZEROS_BEYOND_EDGES = 0, 3, 3, 0
_VECTOR_BYTES = 16
NO_MAP = Struct(bytes(BYTES))  # for a kernel that does not read that parameter


def why_not(matrix: Tensor) -> str | None:
    """Why the copy engine cannot read this matrix of two dimensions, or None."""
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


def tensor_map(matrix: Tensor, box_rows: int, box_columns: int) -> Struct:
    """The map of a CUDA matrix that ``why_not`` has nothing against, for boxes of at most 256 rows
    and 128 bytes of columns, swizzled by 128 bytes in shared memory; zeros beyond the edges.

    Raises BuildError where the driver is older than tensor maps (12.0), LaunchError where it
    refuses the matrix.
    """
    (rows, columns), size = matrix.shape, matrix.element_size()
    # A single row has any stride; the map's must be a multiple of 16 bytes and cover the row.
    pitch = matrix.stride(0) * size if rows > 1 else ceil_div(columns * size, 16) * 16
    dtype = _DTYPES[matrix.dtype]
    return _encoded(matrix.data_ptr(), dtype, rows, columns, pitch, box_rows, box_columns)


# Never stale: the bytes are a function of these arguments, the address among them. Through ctypes
# the driver's encoding costs 8 us.
@lru_cache(maxsize=4096)
def _encoded(
    address: int,
    dtype: int,
    rows: int,
    columns: int,
    pitch: int,
    box_rows: int,
    box_columns: int,
) -> Struct:
    try:
        encode = cuda_driver.library().cuTensorMapEncodeTiled
    except AttributeError:
        raise BuildError(
            "the NVIDIA driver has no tensor maps; update it to 12.0 or newer."
        ) from None
    memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
    place = -ctypes.addressof(memory) % _ALIGNMENT
    status = encode(
        ctypes.c_void_p(ctypes.addressof(memory) + place),
        dtype,
        2,
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * 2)(columns, rows),
        (ctypes.c_uint64 * 1)(pitch),
        (ctypes.c_uint32 * 2)(box_columns, box_rows),
        (ctypes.c_uint32 * 2)(1, 1),
        _INTERLEAVE_NONE,
        _SWIZZLE_128_BYTES,
        _PROMOTE_TO_256_BYTES,
        _ZEROS_BEYOND_EDGES,
    )
    if status:
        raise LaunchError(
            f"the NVIDIA driver makes no tensor map of a matrix of shape {(rows, columns)} whose "
            f"rows are {pitch} bytes apart ({cuda_driver.error_name(status)})."
        )
    return Struct(memory.raw[place : place + BYTES])
