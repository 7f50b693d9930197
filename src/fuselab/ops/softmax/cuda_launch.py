"""Launching the CUDA C++ kernels: which one, and how a row is spread over threads and blocks.

The tables are the default rule; ``fuselab bench softmax --tune`` times ``cuda_candidates``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.hopper import has_clusters
from fuselab.ops.softmax.configs import backward_configs, chosen, forward_configs
from fuselab.ops.softmax.layout import FORMS, Form, Rows, vector_length
from fuselab.ops.softmax.operands import Launcher
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))


def _row(threads: int, elements: int, blocks: int = 1, cluster: int = 1) -> Config:
    """How a row that stays in registers is spread: one line of a tuning table.

    ``threads`` threads of each of ``cluster`` blocks hold ``elements`` elements each; up to 32
    threads several rows share a block. ``blocks`` blocks shall fit one SM: it bounds registers.
    """
    return Config(threads=threads, elements=elements, blocks=blocks, cluster=cluster)


def _width(config: Config) -> int:
    """The widest row that a ``_row`` holds."""
    return int(config.threads * config.elements * config.cluster)


# Threads of an SM that can run without spilling, by elements per thread (sm_90, both forms, CUDA
# 13.0): 32 registers each at 2048, 64 at 1024. Keyed by step and bytes of the widest dtype. Where a
# 16-bit forward's share has no room for the terms, it computes them twice (has_terms_twice of
# cuda_kernels.cu): 32 elements in 32 registers, nothing spilt (float16's log_softmax: 14 words). So
# 128 KB of a bfloat16 row are in flight per SM, as of a float32 one, where the terms allow 64, for
# 11 instructions per element instead of 8 (softmax).
# Registers, softmax / log_softmax, at these bounds:
#   forward, 16 elements     float32 32 / 32, bfloat16 32 / 32: 128 / 64 KB in flight per SM
#   forward, 32 elements     float32 64 / 63 (cluster 64 / 64), bfloat16 47 / 64 (56 / 56), terms
#                            twice 32 / 32
#   backward, 16 elements    float32 47 / 50 (48 / 59), bfloat16 32 / 32: 128 KB in flight per SM
#   backward, 32 elements    bfloat16 56 / 64
# Above them they spill: 26 to 48 words for 32 elements with their terms, forward at 2048 threads.
# Within them so do float16's backward with 32 elements (11 words) and rows read element by element,
# of odd widths (2 to 6 words; bfloat16's backward with 32 elements 58). Loads and stores are
# LDG.E.128 and STG.E.128 where vector_length allows, loads all issued before the first use.
_FITTING_THREADS = {
    ("forward", 2): ((8, 2048), (16, 2048), (32, 1024), (32, 2048)),
    ("forward", 4): ((8, 2048), (16, 2048), (32, 1024)),
    ("backward", 2): ((8, 2048), (16, 2048), (32, 1024)),
    ("backward", 4): ((8, 2048), (16, 1024)),
    ("forward", 8): ((8, 512),),
    ("backward", 8): ((8, 512),),
}
# The first line that is wide enough is taken; clusters only on sm_90 and newer, those of 16 where
# the device has room for one. A cluster's blocks exchange by st.async, so that nothing waits for a
# memory fence.
#
# Clusters grow with the bytes that a row keeps on chip (backward: of two tensors), so that a block
# has 64 KB at most and an SM two or more: one loads while another exchanges and writes. Past
# clusters of 16 it has 128 KB. A line serves down to half its width, with half the bytes in flight.
# H200, 2026-11-21, us (share of the limit), chosen against the next best:
#   forward   bfloat16  2048x65536   4 blocks of 16 KB, by 4   134 (98 %)   2 of 32 KB, by 2   134
#             bfloat16  1024x262144  4 of 16 KB, by 16         262 (97 %)   2 of 32 KB, by 8   268
#             float32   4096x16384   8 of 16 KB, by 4          133 (98 %)   2 of 64 KB, one    135
#             float32   1024x262144  2 of 64 KB, by 16         530 (95 %)   1 of 128 KB, by 8  537
#   backward  bfloat16  1024x262144  2 of 64 KB, by 16         380 (98 %)   1 of 128 KB, by 8  380
#             float32   1024x262144  1 of 128 KB, by 16        816 (91 %)   in pieces         1228
# Without terms twice the two bfloat16 forwards took 142 and 304 at best, the latter by clusters
# that stay and have the next row copied into shared memory meanwhile. From these follow, not timed
# themselves, float16 (the bytes of bfloat16), log_softmax (softmax's), 32768 and 131072 (their
# neighbours' blocks) and 524288 (262144's, with blocks of twice as many threads).
_NARROW = tuple(_row(threads, 8, 16) for threads in (1, 2, 4, 8, 16, 32))
_FORWARD = (
    *_NARROW,
    _row(32, 16, 16),
    _row(32, 32, 8),
    _row(128, 16, 16),
    _row(256, 16, 8),
    _row(512, 16, 4),
    _row(1024, 16, 2),
)
_FORWARD_ONE_BLOCK = (*_FORWARD, _row(1024, 32))
_FORWARD_FLOAT = (
    *_FORWARD[:-1],
    _row(256, 16, 8, cluster=4),
    _row(512, 32, 2, cluster=2),
    _row(512, 32, 2, cluster=4),
    _row(512, 32, 2, cluster=8),
    _row(1024, 16, 2, cluster=16),
    _row(1024, 32, 1, cluster=8),
    _row(1024, 32, 1, cluster=16),
)
_FORWARD_HALF = (
    *_FORWARD,
    _row(512, 32, 4, cluster=2),
    _row(512, 32, 4, cluster=4),
    _row(512, 32, 4, cluster=8),
    _row(512, 32, 4, cluster=16),
    _row(1024, 32, 2, cluster=8),
    _row(1024, 32, 2, cluster=16),
)
_BACKWARD_FLOAT = (
    *_NARROW,
    _row(32, 16, 8),
    _row(128, 8, 8),
    _row(128, 16, 8),
    _row(256, 16, 4),
    _row(512, 16, 2),
    _row(256, 16, 4, cluster=4),
    _row(256, 16, 4, cluster=8),
    _row(512, 16, 2, cluster=8),
    _row(1024, 16, 1, cluster=8),
    _row(1024, 16, 1, cluster=16),
)
_BACKWARD_FLOAT_ONE_BLOCK = (*_BACKWARD_FLOAT[:11], _row(1024, 16))
_BACKWARD_HALF = (
    *_NARROW,
    _row(32, 16, 16),
    _row(32, 32, 8),
    _row(128, 16, 8),
    _row(256, 16, 4),
    _row(512, 16, 2),
    _row(512, 32, 2),
    _row(512, 32, 2, cluster=2),
    _row(512, 32, 2, cluster=4),
    _row(512, 32, 2, cluster=8),
    _row(512, 32, 2, cluster=16),
    _row(1024, 32, 1, cluster=8),
    _row(1024, 32, 1, cluster=16),
)
_DOUBLE = tuple(_row(threads, 8) for threads in (1, 2, 4, 8, 16, 32, 256, 512, 1024))
CUDA_ROWS = {
    ("forward", 2): (_FORWARD_HALF, _FORWARD_ONE_BLOCK),
    ("forward", 4): (_FORWARD_FLOAT, _FORWARD_ONE_BLOCK),
    ("forward", 8): (_DOUBLE, _DOUBLE),
    ("backward", 2): (_BACKWARD_HALF, _BACKWARD_HALF[:12]),
    ("backward", 4): (_BACKWARD_FLOAT, _BACKWARD_FLOAT_ONE_BLOCK),
    ("backward", 8): (_DOUBLE, _DOUBLE),
}

# Rows wider than the tables: 62 blocks for a row of 1,000,000. Two more passes over memory than on
# chip, less what L2 still holds: at least 2/3 of the floor forward, 3/5 backward (log_softmax 3/4).
# Pieces of ``piece`` elements, one block each, with ``vectors`` vectors per thread in flight; half
# and twice as long, or with 4 in flight, they took 0.98 to 1.07 of the time (262144 wide, H200,
# 2026-11-21).
_PIECES = Config(piece=16384, threads=512, vectors=2)
_MOST_PIECES = 1024  # of a row: every block of the second launch reads all of the first's results

# (elements per thread, warps): columns held in registers. 0 warps: one thread owns a column.
# The first line that holds the width at 32, 16 or 8 lanes across columns is taken (8 floats are one
# 32-byte sector); wider columns are read twice by the last line's warps. Registers in float32,
# softmax: 32 forward and 53 backward at (16, 32), 80 and 113 at (32, 0). The backward at (16, 32)
# spills 48 words in float64.
# The steps below 32 follow the width closely, since every slot costs its 40 instructions, used or
# not: at 19 elements in slots of 32 the backward was bound by issuing them (1500 per thread, in
# slots of 20 1030; 32x19x128x128 took 40 to 63 us where memory takes 20, H200).
CUDA_COLUMNS = (
    *((elements, 0) for elements in (8, 12, 16, 20, 24, 32)),
    *((16, warps) for warps in (4, 8, 16, 32)),
)
_COLUMN_LANES = (32, 16, 8)
# Threads that own 16-bit columns alone take two neighbours where they can (_move_in_pairs). One by
# one they are 64 bytes per warp and access, and bound by issuing: log_softmax at 19 elements takes
# 952 + 984 instructions per column (sm_90, forward + backward), in pairs 628 + 620; 32x19x128x128
# in bfloat16 24.5 and 30.5 us, in pairs 20.4 and 26.3 (H200, 2026-11-21).

_NARROW_BLOCK = 128  # kNarrowBlock of cuda_kernels.cu
_ASKS_FOR_16 = 65536  # rows as wide make do with clusters of 8


@functools.cache
def _has_clusters_of_16(device: torch.device) -> bool:
    """Whether a GPC of the device has room for 16 of the largest blocks that any kernel here has,
    of 1024 threads."""
    config = _row(1024, 16, cluster=16)
    expression = _resident("backward", ("kSoftmax", "float", "float"), (4, 4), config)
    index = torch.cuda.current_device() if device.index is None else device.index
    return CUDA.active_clusters(expression, index, config.threads, 0, config.cluster) > 0


def _largest_cluster(width: int, device: torch.device) -> int:
    """In blocks. The question about 16 compiles a kernel: rows that need fewer do not ask."""
    if not has_clusters(device):
        return 1
    return 16 if width > _ASKS_FOR_16 and _has_clusters_of_16(device) else 8


def cuda_candidates(step: str, itemsize: int, width: int, largest: int) -> tuple[Config, ...]:
    """What tuning may choose from for rows of ``width``, the tables' choice first: spreads of all
    kinds that hold it without spilling, at full occupancy, and in one block at half; and pieces.

    ``itemsize`` is that of the widest dtype, ``largest`` the blocks of the largest cluster.
    """
    with_clusters, one_block = CUDA_ROWS[step, itemsize]
    lines = [
        line
        for line in (with_clusters if largest > 1 else one_block)
        if _width(line) >= width and line.cluster <= largest
    ]
    default = lines[0] if lines else _PIECES
    bucket = power_of_two(width)
    fitting = _FITTING_THREADS[step, itemsize]
    if width <= 512:
        narrow = [
            _row(threads, elements, dict(fitting).get(elements, 2048) // _NARROW_BLOCK)
            for elements in (4, 8, 16)
            for threads in (4, 8, 16, 32)
            if threads * elements == bucket and 16 <= elements * itemsize <= 64 and itemsize < 8
        ]
        return tuple(dict.fromkeys((default, *narrow)))
    spreads = [
        _row(threads, elements, most // threads // share, cluster)
        for elements, most in fitting
        for threads in (128, 256, 512, 1024)
        for cluster in (1, 2, 4, 8, 16)
        if cluster <= (largest if itemsize < 8 else 1)
        for share in ((1, 2) if cluster == 1 else (1,))
        if threads * elements * cluster == bucket and threads * share <= most
        if most * elements <= 32768 or threads >= 512  # with terms twice few, each is compiled
    ]
    pieces = (_PIECES,) if width > 16384 else ()
    return tuple(dict.fromkeys((default, *spreads, *pieces)))


@functools.lru_cache(1024)
def _configs(step: str, itemsize: int, width: int, device: torch.device) -> tuple[Config, ...]:
    return cuda_candidates(step, itemsize, width, _largest_cluster(width, device))


def _launch(
    step: str,
    form: Form,
    rows: Rows,
    tensors: tuple[Tensor, ...],
) -> None:
    """Launch the kernels of one step on rows: the tensors, then where they lie."""
    types = (*_form(step, form, tensors), *(CUDA_NAMES[tensors[i].dtype] for i in (0, -1)))
    vectors = _vectors(step, rows, tensors)
    strides = (i64(rows.outer_stride), i64(rows.inner_stride), i64(rows.dim_stride))
    places = (i64(rows.inner_count), *strides)
    if rows.columns:
        elements, lanes, warps = cuda_columns(rows)
        across = 2 if not warps and _move_in_pairs(rows, tensors) else 1
        index = "int64_t" if rows.widest_offset >= 2**30 else "int32_t"
        expression = _instance(f"{step}_columns", *types, elements, lanes, warps, across, index)
        block, per_block = (warps * 32, lanes) if warps else (_NARROW_BLOCK, _NARROW_BLOCK * across)
        grid = ceil_div(rows.rows, per_block)
        CUDA.launch(
            expression,
            (grid, 1, 1),
            (block, 1, 1),
            (*tensors, i64(rows.rows), i64(rows.width), *places),
        )
        return
    config = chosen("cuda", _configs, step, form, rows, tensors)
    if "cluster" in config:
        block = config.threads if config.threads > 32 else _NARROW_BLOCK
        grid = ceil_div(rows.rows * config.threads * config.cluster, block)
        CUDA.launch(
            _resident(step, types, vectors, config),
            (grid, 1, 1),
            (block, 1, 1),
            (*tensors, i64(rows.rows), i32(rows.width), *places),
        )
        return
    length = config.piece * ceil_div(rows.width, config.piece * _MOST_PIECES)
    pieces = ceil_div(rows.width, length)
    # The workspace: maximum and sum, or the sum, of every piece; 0.05 % of the tensors at most.
    accumulated, values = (tensors[-1], 2) if step == "forward" else (tensors[0], 1)
    dtype = torch.float64 if accumulated.dtype == torch.float64 else torch.float32
    of_piece = torch.empty((rows.rows, pieces, values), dtype=dtype, device=accumulated.device)
    sizes = (i64(rows.width), i32(pieces), i64(length), *places)
    for expression, arguments in zip(
        _in_pieces(step, types, vectors, rows.width, config),
        ((*tensors[:-1], of_piece), (*tensors, of_piece)),
        strict=True,
    ):
        CUDA.launch(
            expression,
            (rows.rows * pieces, 1, 1),
            (config.threads, 1, 1),
            (*arguments, *sizes),
        )


def _move_in_pairs(rows: Rows, tensors: tuple[Tensor, ...]) -> bool:
    """Whether one access moves an element of two neighbouring 16-bit columns, in every tensor."""
    steps = rows.inner_count, rows.outer_stride, rows.dim_stride
    pairs = all(tensor.element_size() == 2 and not tensor.data_ptr() % 16 for tensor in tensors)
    return pairs and rows.inner_stride == 1 and not any(step % 2 for step in steps)


def _form(step: str, form: Form, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """The kernels' first template arguments."""
    if step == "backward":
        return (FORMS[form],)
    return FORMS[form], "kInPlace" if tensors[0] is tensors[-1] else "kApart"


def _vectors(step: str, rows: Rows, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """The kernels' vector lengths: of all tensors, and in the backward of grad_output."""
    if step == "forward":
        return (vector_length(rows, *tensors),)
    grad_output, output, grad_input = tensors
    contiguous = Rows(rows.rows, rows.width, 1, rows.width, 0, 1, rows.columns)
    vector = vector_length(contiguous, output, grad_input)
    return vector, vector if vector_length(rows, grad_output, grad_input) % vector == 0 else 1


def _instance(name: str, *arguments: object) -> str:
    return f"{name}<{', '.join(map(str, arguments))}>"


def _resident(step: str, types: Sequence[str], vectors: tuple[int, ...], config: Config) -> str:
    arguments = (*types, *vectors, config.elements // vectors[0], config.threads)
    # Elements that come one by one, or are cast, have no pairs to compute terms twice from: they
    # spill 20 to 75 words, and 3 in twice the registers.
    pairs = vectors[0] > 1 and types[-1] == types[-2]
    halved = not pairs and config.elements * config.threads * config.blocks > 32768
    arguments = (*arguments, config.blocks // 2 if halved else config.blocks)
    if config.cluster == 1:
        return _instance(f"{step}_resident", *arguments)
    return _instance(f"{step}_cluster", *arguments, config.cluster)


def _in_pieces(
    step: str, types: Sequence[str], vectors: tuple[int, ...], width: int, config: Config
) -> tuple[str, str]:
    """The kernel that reads the pieces, which knows neither the output's aliasing nor the
    gradient's type, and the one that applies what it found."""
    index = "int64_t" if width >= 2**30 else "int32_t"
    reading = (types[0], *types[2:]) if step == "forward" else types[:-1]
    arguments = (*vectors, config.vectors, config.threads, index)
    return (
        _instance(f"{step}_pieces", *reading, *arguments),
        _instance(f"{step}_apply", *types, *arguments),
    )


def cuda_columns(rows: Rows) -> tuple[int, int, int]:
    """Elements per thread (0: read twice), lanes across columns and warps of a columns kernel."""
    neighbours = power_of_two(rows.inner_count)
    for elements, warps in CUDA_COLUMNS:
        for lanes in _COLUMN_LANES:
            lanes = min(lanes, neighbours) if warps else lanes  # alone, a lane has no part in it
            if elements * (warps * (32 // lanes) or 1) >= rows.width:
                return elements, lanes, warps
    return 0, min(_COLUMN_LANES[0], neighbours), CUDA_COLUMNS[-1][1]


_LAUNCHER = Launcher(_launch)
forward, forward_in_place = _LAUNCHER.forward, _LAUNCHER.forward_in_place
backward = _LAUNCHER.backward
configs = functools.partial(forward_configs, _configs)
configs_backward = functools.partial(backward_configs, _configs)


def _representative_expressions() -> tuple[str, ...]:
    """Every line of the tables, and every kernel at other types and vector lengths; both forms
    where they differ."""
    found: list[str] = []
    for dtype, vector in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float64, 2)):
        types = (CUDA_NAMES[dtype],) * 2
        for step, form, lengths in _steps(vector):
            lines = CUDA_ROWS[step, dtype.itemsize][0][3 if form[0] == "kSoftmax" else -4 :]
            found += [_resident(step, (*form, *types), lengths, line) for line in lines]
            found += _in_pieces(step, (*form, *types), lengths, 2**20, _PIECES)
    for config in (_row(1024, 32, 2), _row(512, 32, 4, cluster=4)):  # terms twice
        for _, form, lengths in (*_steps(8)[:2], *_steps(1)[:2]):
            for output in ("__half", "__nv_bfloat16"):
                found.append(_resident("forward", (*form, "__half", output), lengths, config))
    for types in (("__half", "__half"), ("__half", "float"), ("double", "__nv_bfloat16")):
        for step, form, lengths in _steps(1):
            found.append(_resident(step, (*form, *types), lengths, _row(4, 8)))
            found += _in_pieces(step, (*form, *types), lengths, 2**31, _PIECES)
            for elements, lanes, warps in ((0, 8, 32), (16, 32, 0), (20, 32, 0), (16, 8, 8)):
                arguments = (*form, *types, elements, lanes, warps, 1, "int32_t")
                found.append(_instance(f"{step}_columns", *arguments))
    for step, form, _ in _steps(1):
        for elements in (16, 20, 32):
            arguments = (*form, *(CUDA_NAMES[torch.bfloat16],) * 2, elements, 32, 0, 2, "int32_t")
            found.append(_instance(f"{step}_columns", *arguments))
    return tuple(dict.fromkeys(found))


def _steps(vector: int) -> tuple[tuple[str, tuple[str, ...], tuple[int, ...]], ...]:
    return (
        ("forward", ("kSoftmax", "kApart"), (vector,)),
        ("forward", ("kLogSoftmax", "kInPlace"), (vector,)),
        ("backward", ("kSoftmax",), (vector, vector)),
        ("backward", ("kLogSoftmax",), (vector, vector)),
    )


CUDA_EXPRESSIONS = _representative_expressions()
