"""Launching the CUDA C++ kernels: which one, and how a row is spread over threads.

The tables are the tuning: edit a line, or time ``cuda_candidates`` by ``forward(..., config=...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops.softmax.layout import Rows, rows_in_place_or_copied, vector_length
from fuselab.ops.softmax.tensors import cast, empty_gradient, empty_output, readable
from fuselab.runtime.cuda_source import CudaSource, i32, i64

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_TYPES = {
    torch.float32: "float",
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float64: "double",
}


@dataclass(frozen=True, slots=True)
class RowConfig:
    """How a row that stays in registers is spread: one line of a tuning table.

    ``threads`` threads of each of ``cluster`` blocks hold ``elements`` elements each; up to 32
    threads several rows share a block. ``blocks`` blocks shall fit one SM (it bounds registers).
    """

    threads: int
    elements: int
    blocks: int = 1
    cluster: int = 1

    @property
    def width(self) -> int:
        """The widest row it holds."""
        return self.threads * self.elements * self.cluster


_NARROW = tuple(RowConfig(threads, 8) for threads in (1, 2, 4, 8, 16, 32))

# The first line that is wide enough is taken; clusters only on sm_90 and newer. Keyed by the bytes
# of the widest dtype. Registers per thread, from cuobjdump for sm_90 (float32 / bfloat16):
#   forward   (256, 16) 32 / 31: 8 blocks, all 2048 threads of an SM, 128 / 64 KB in flight
#             (1024, 16, 2) 32 / 32; (1024, 32) 48; cluster 4 of (512, 32, 2) 54 / 48, 8 of
#             (1024, 32) 61 / 63
#   backward  (256, 16) 48 / 44: 5 blocks, 160 / 80 KB in flight; (1024, 16) 47: one block, so no
#             load runs beside a store, which cluster 4 of (256, 16), 46, avoids; (512, 32) 80 / 64
# None of them spills. (512, 32, 3) forward and (1024, 16, 2) backward in bfloat16 would: 13 and 11
# words. Loads and stores are LDG.E.128 and STG.E.128 where vector_length allows, loads all issued
# before the first use; one BAR.SYNC a row, none up to 32 threads, two cluster barriers in a cluster
# (of which the first is long past when it is asked for).
_FORWARD = (
    *_NARROW,
    RowConfig(32, 16),
    RowConfig(32, 32),
    RowConfig(128, 16),
    RowConfig(256, 16),
    RowConfig(512, 16),
    RowConfig(1024, 16, blocks=2),
    RowConfig(512, 32, blocks=2, cluster=2),
    RowConfig(1024, 32),
    RowConfig(512, 32, blocks=2, cluster=4),
    RowConfig(512, 32, blocks=2, cluster=8),
    RowConfig(1024, 32, cluster=8),
)
_BACKWARD_FLOAT = (
    *_NARROW,
    RowConfig(32, 16),
    RowConfig(128, 8),
    RowConfig(128, 16),
    RowConfig(256, 16),
    RowConfig(512, 16),
    RowConfig(256, 16, cluster=4),
    RowConfig(1024, 16),
    RowConfig(256, 16, cluster=8),
    RowConfig(512, 16, cluster=8),
    RowConfig(1024, 16, cluster=8),
)
_BACKWARD_HALF = (
    *_NARROW,
    RowConfig(32, 16),
    RowConfig(32, 32),
    RowConfig(128, 16),
    RowConfig(256, 16),
    RowConfig(512, 16),
    RowConfig(512, 32, blocks=2),
    RowConfig(512, 32, blocks=2, cluster=2),
    RowConfig(512, 32, blocks=2, cluster=4),
    RowConfig(512, 32, blocks=2, cluster=8),
)
_DOUBLE = (*_NARROW, RowConfig(256, 8), RowConfig(512, 8), RowConfig(1024, 8))
CUDA_ROWS = {
    "forward": {2: _FORWARD, 4: _FORWARD, 8: _DOUBLE},
    "backward": {2: _BACKWARD_HALF, 4: _BACKWARD_FLOAT, 8: _DOUBLE},
}

# Rows too wide for the tables pass twice through blocks of these threads, with so many vectors of
# each in flight. In clusters fewer rows are under way, and their second pass finds more in L2.
LOOPED_THREADS = 512
LOOPED_VECTORS = {"forward": 4, "backward": 2}
LOOPED_CLUSTER = 8

# (elements per thread, warps): columns held in registers. 0 warps: one thread owns a column.
# The first line that holds the width at 32, 16 or 8 lanes across columns is taken (8 floats are one
# 32-byte sector); wider columns are read twice by the last line's warps. Registers in float32: 32
# forward and 55 backward at (16, 32), 78 and 128 at (32, 0). The backward at (16, 32) spills 40
# words in float64.
CUDA_COLUMNS = ((8, 0), (16, 0), (32, 0), (16, 4), (16, 8), (16, 16), (16, 32))
_COLUMN_LANES = (32, 16, 8)

_NARROW_BLOCK = 128  # kNarrowBlock of cuda_kernels.cu


def cuda_candidates(width: int) -> tuple[RowConfig, ...]:
    """What tuning may try for rows of ``width``: spreads that hold them and waste less than half.

    Time one with ``forward(input, dim, dtype, config=...)`` or ``backward(..., config=...)``.
    """
    spreads = (
        RowConfig(threads, elements, blocks, cluster)
        for threads in (32, 64, 128, 256, 512, 1024)
        for elements in (8, 16, 32)
        for blocks in ((1, 2) if threads * elements == 16384 else (1,))
        for cluster in (1, 2, 4, 8)
        if cluster == 1 or threads >= 128
    )
    return tuple(spread for spread in spreads if spread.width // 2 < width <= spread.width)


@functools.cache
def _has_clusters(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) >= (9, 0)


def _row_config(step: str, itemsize: int, rows: Rows, clusters: bool) -> RowConfig | None:
    for config in CUDA_ROWS[step][itemsize]:
        if config.width >= rows.width and (clusters or config.cluster == 1):
            return config
    return None


def _launch(
    step: str,
    rows: Rows,
    vectors: tuple[int, ...],
    tensors: tuple[Tensor, ...],
    config: RowConfig | None,
) -> None:
    """Launch ``forward_*`` or ``backward_*`` on rows: the tensors, then where they lie.

    ``vectors`` are the kernel's vector lengths: of all tensors, and in the backward of grad_output.
    """
    types = [_TYPES[tensors[0].dtype], _TYPES[tensors[-1].dtype]]
    itemsize = max(tensor.element_size() for tensor in tensors)
    strides = (i64(rows.outer_stride), i64(rows.inner_stride), i64(rows.dim_stride))
    places = (i64(rows.inner_count), *strides)
    if rows.columns:
        elements, lanes, warps = cuda_columns(rows)
        index = "int64_t" if rows.widest_offset >= 2**30 else "int32_t"
        expression = _instance(f"{step}_columns", *types, elements, lanes, warps, index)
        block, per_block = (warps * 32, lanes) if warps else (_NARROW_BLOCK, _NARROW_BLOCK)
        grid = -(-rows.rows // per_block)
        CUDA.launch(
            expression,
            (grid, 1, 1),
            (block, 1, 1),
            (*tensors, i64(rows.rows), i64(rows.width), *places),
        )
        return
    clusters = _has_clusters(tensors[0].device)
    config = config or _row_config(step, itemsize, rows, clusters)
    if config is not None:
        block = config.threads if config.threads > 32 else _NARROW_BLOCK
        grid = -(-rows.rows * config.threads * config.cluster // block)
        expression = _resident(step, types, vectors, config)
        CUDA.launch(
            expression,
            (grid, 1, 1),
            (block, 1, 1),
            (*tensors, i64(rows.rows), i32(rows.width), *places),
        )
        return
    cluster = LOOPED_CLUSTER if clusters and itemsize < 8 else 1
    expression = _looped(step, types, vectors, rows.width, cluster)
    CUDA.launch(
        expression,
        (rows.rows * cluster, 1, 1),
        (LOOPED_THREADS, 1, 1),
        (*tensors, i64(rows.width), *places),
    )


def _instance(name: str, *arguments: object) -> str:
    return f"{name}<{', '.join(map(str, arguments))}>"


def _resident(step: str, types: Sequence[str], vectors: tuple[int, ...], config: RowConfig) -> str:
    arguments = (*types, *vectors, config.elements // vectors[0], config.threads, config.blocks)
    if config.cluster == 1:
        return _instance(f"{step}_resident", *arguments)
    return _instance(f"{step}_cluster", *arguments, config.cluster)


def _looped(
    step: str, types: Sequence[str], vectors: tuple[int, ...], width: int, cluster: int
) -> str:
    index = "int64_t" if width >= 2**30 else "int32_t"
    arguments = (*types, *vectors, LOOPED_VECTORS[step], LOOPED_THREADS, index)
    if cluster == 1:
        return _instance(f"{step}_looped", *arguments)
    return _instance(f"{step}_looped_cluster", *arguments, cluster)


def cuda_columns(rows: Rows) -> tuple[int, int, int]:
    """Elements per thread (0: read twice), lanes across columns and warps of a columns kernel."""
    neighbours = 1 << (rows.inner_count - 1).bit_length()
    for elements, warps in CUDA_COLUMNS:
        for lanes in _COLUMN_LANES:
            lanes = min(lanes, neighbours)
            if elements * (warps * (32 // lanes) or 1) >= rows.width:
                return elements, lanes, warps
    return 0, min(_COLUMN_LANES[0], neighbours), CUDA_COLUMNS[-1][1]


def forward(
    input: Tensor, dim: int, dtype: torch.dtype | None, config: RowConfig | None = None
) -> Tensor:
    """The forward in CUDA C++; ``config`` replaces the table's choice for rows that fit it."""
    output = empty_output(input, dtype)
    if output.numel() == 0:
        return output
    input, rows = rows_in_place_or_copied(readable(input, output.dtype), dim)
    vector = vector_length(rows, input, output)
    _launch("forward", rows, (vector,), (input, output), config)
    return output


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor,
    dim: int,
    input_dtype: torch.dtype,
    config: RowConfig | None = None,
) -> tuple[Tensor | None, ...]:
    """The gradient in CUDA C++; ``config`` as in ``forward``."""
    if not needs[0]:
        return (None,)
    grad_input = empty_gradient(output, input_dtype)
    if grad_input.numel():
        grad_output, rows = rows_in_place_or_copied(grad_output, dim)
        output = output.contiguous()
        contiguous = Rows(rows.rows, rows.width, 1, rows.width, 0, 1, rows.columns)
        vector = vector_length(contiguous, output, grad_input)
        grad_vector = vector if vector_length(rows, grad_output, grad_input) % vector == 0 else 1
        _launch("backward", rows, (vector, grad_vector), (grad_output, output, grad_input), config)
    return (cast(grad_input, input_dtype),)


def _representative_expressions() -> tuple[str, ...]:
    """Every spread of the tables, and every kernel at other types and vector lengths."""
    found: list[str] = []
    for dtype, vector in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float64, 2)):
        types = (_TYPES[dtype],) * 2
        for step, lengths in (("forward", (vector,)), ("backward", (vector, vector))):
            configs = CUDA_ROWS[step][dtype.itemsize]
            found += [_resident(step, types, lengths, config) for config in configs[3:]]
            found.append(_looped(step, types, lengths, 2**20, 1))
            if dtype != torch.float64:
                found.append(_looped(step, types, lengths, 2**20, LOOPED_CLUSTER))
    for types in (("__half", "__half"), ("__half", "float"), ("double", "__nv_bfloat16")):
        for step, lengths in (("forward", (1,)), ("backward", (1, 1))):
            found.append(_resident(step, types, lengths, RowConfig(4, 8)))
            found.append(_looped(step, types, lengths, 2**31, 1))
            for elements, warps in ((0, 32), (16, 0), (16, 8)):
                found.append(_instance(f"{step}_columns", *types, elements, 8, warps, "int32_t"))
    return tuple(found)


CUDA_EXPRESSIONS = _representative_expressions()
