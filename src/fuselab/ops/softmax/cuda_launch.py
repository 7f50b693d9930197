"""Launchers of the CUDA C++ kernels: which one runs, and how a row is spread over threads and
blocks.

The tables are the default rule; ``fuselab bench softmax --tune`` times ``cuda_candidates``.
"""

from __future__ import annotations

import functools
import math
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
    """Return how a row that stays in registers is spread: one line of a tuning table.

    ``threads`` threads of each of ``cluster`` blocks have ``elements`` elements each; with up to 32
    threads, several rows share a block. ``blocks`` blocks must fit a multiprocessor, which limits
    the registers.
    """
    return Config(threads=threads, elements=elements, blocks=blocks, cluster=cluster)


def _width(config: Config) -> int:
    """Return the widest row that fits a ``_row``."""
    return int(config.threads * config.elements * config.cluster)


# Threads of a multiprocessor that can run without spilling, by elements per thread (sm_90, both
# forms, CUDA 13.0): with 32 registers each 2048 can run, with 64 registers 1024. The key is the
# step and the bytes of the widest dtype. If a 16-bit forward's registers have no room for the
# terms, it computes them twice (has_terms_twice of cuda_kernels.cu): 32 elements in 32 registers.
# That keeps 128 KB of a bfloat16 row in flight per multiprocessor, as much as of a float32 row, for
# 11 instructions per element instead of 8. Rows that are read element by element, of odd widths,
# spill a few words.
_FITTING_THREADS = {
    ("forward", 2): ((8, 2048), (16, 2048), (32, 1024), (32, 2048)),
    ("forward", 4): ((8, 2048), (16, 2048), (32, 1024)),
    ("backward", 2): ((8, 2048), (16, 2048), (32, 1024)),
    ("backward", 4): ((8, 2048), (16, 1024)),
    ("forward", 8): ((8, 512),),
    ("backward", 8): ((8, 512),),
}
# The first line that is wide enough is used. Clusters need sm_90 or newer, and those of 16 a device
# with room for one. A cluster's blocks exchange values by st.async, so that none waits for a memory
# fence.
#
# Clusters grow with the bytes that a row keeps on chip (in the backward of two tensors), so that a
# block has at most 64 KB and a multiprocessor two blocks or more: one loads while another exchanges
# and writes. Rows beyond clusters of 16 have 128 KB per block. A line serves widths down to half of
# its own, with half the bytes in flight. With these lines wide rows reach 95 to 98 % of the limit
# on an H200, and 91 % in the backward of 1024x262144 in float32. float16, log_softmax and the
# widths 32768, 131072 and 524288 follow from their neighbours and were not timed.
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

# Blocks' worth of ``_NARROW_BLOCK`` threads of a multiprocessor that run without spilling, by the
# most elements per thread (sm_90, both forms, shifted rows or not, CUDA 13.0).
_RESIDENT = {
    ("forward", 2): ((16, 16), (24, 12), (40, 8)),
    ("forward", 4): ((16, 16), (20, 12), (40, 8)),
    ("backward", 2): ((16, 16), (24, 12), (40, 8)),
    ("backward", 4): ((8, 16), (24, 8), (32, 6), (40, 4)),
}
# Every slot of a thread costs its instructions, used or not, and 16-bit rows are bound by them. A
# spread of another number of vectors is used where it has so many times fewer slots than the line.
# Of a bfloat16 row of 257 in slots of 512, half of the 664 instructions of a warp did nothing; four
# such rows in the slots of 8 threads with 40 elements take 1208 together.
_WORTH_A_CLOSER_FIT = 1.25
_MANY_ELEMENTS = 2**20  # of fewer, few threads per row would leave most multiprocessors idle

# Rows wider than the tables are split into pieces of ``piece`` elements, one block each, with
# ``vectors`` vectors per thread in flight: 62 blocks for a row of 1,000,000. Such a row takes two
# more passes over memory than a row on chip, less what L2 still has. Pieces half and twice as long
# were within 7 % on an H200.
_PIECES = Config(piece=16384, threads=512, vectors=2)
_MOST_PIECES = 1024  # per row, because every block of the second launch reads all partial results

# (elements per thread, warps) of columns that are held in registers; with 0 warps one thread owns a
# column. The first line that fits the width with 32, 16 or 8 lanes across columns is used (8 floats
# are one 32-byte sector). Wider columns are read twice, by the last line's warps.
#
# The steps below 32 follow the width closely, because every slot costs its 40 instructions, used or
# not: 19 elements in slots of 32 were limited by instruction issue.
CUDA_COLUMNS = (
    *((elements, 0) for elements in (8, 12, 16, 20, 24, 32)),
    *((16, warps) for warps in (4, 8, 16, 32)),
)
_COLUMN_LANES = (32, 16, 8)
# Threads that own whole 16-bit columns take two neighbouring columns if they can (_move_in_pairs).
# One by one an access is 64 bytes per warp, and instruction issue is the limit: 32x19x128x128 in
# bfloat16 took 24.5 us forward, and 20.4 in pairs (log_softmax, H200).

_NARROW_BLOCK = 128  # kNarrowBlock of cuda_kernels.cu
_ASKS_FOR_16 = 65536  # rows up to this width need clusters of 8 at most


@functools.cache
def _has_clusters_of_16(device: torch.device) -> bool:
    """Return whether a group of multiprocessors (a GPC) has room for 16 of the largest blocks that
    any kernel here has, of 1024 threads."""
    config = _row(1024, 16, cluster=16)
    expression = _resident("backward", ("kSoftmax", "float", "float"), (4, 4), config)
    index = torch.cuda.current_device() if device.index is None else device.index
    return CUDA.active_clusters(expression, index, config.threads, 0, config.cluster) > 0


def _largest_cluster(width: int, device: torch.device) -> int:
    """Return the blocks of the largest usable cluster. Asking about 16 compiles a kernel, so it is
    done only for rows that may need them."""
    if not has_clusters(device):
        return 1
    return 16 if width > _ASKS_FOR_16 and _has_clusters_of_16(device) else 8


def _closest(step: str, itemsize: int, width: int) -> Config | None:
    """Return the spread over threads of one block that has the fewest slots for a row of ``width``,
    of any number of vectors per thread; None for rows that no such spread fits."""
    vector = 16 // itemsize
    fitting = [
        (threads * elements, -threads, elements)
        for threads in (4, 8, 16, 32, 64, 128, 256, 512)
        for elements in range(16, 40 + 1 if threads <= 32 else 24 + 1, vector)
        if threads * elements >= width
    ]
    if itemsize == 8 or not fitting:
        return None
    slots, _, elements = min(fitting)
    threads = slots // elements
    blocks = next(blocks for most, blocks in _RESIDENT[step, itemsize] if elements <= most)
    return _row(threads, elements, blocks * _NARROW_BLOCK // max(threads, _NARROW_BLOCK))


def cuda_candidates(
    step: str, itemsize: int, width: int, largest: int, many: bool = True
) -> tuple[Config, ...]:
    """Return the configurations that tuning may choose from for rows of ``width``, the default
    first: all spreads that fit it without spilling, at full occupancy, and in one block also at
    half; and pieces. The default is the tables' choice, or with ``many`` elements a closer fit.

    ``itemsize`` is that of the widest dtype, ``largest`` the blocks of the largest cluster.
    """
    with_clusters, one_block = CUDA_ROWS[step, itemsize]
    width = _room(itemsize, width)
    lines = [
        line
        for line in (with_clusters if largest > 1 else one_block)
        if _width(line) >= width and line.cluster <= largest
    ]
    default = lines[0] if lines else _PIECES
    on_one_block = "cluster" in default and default.cluster == 1
    closest = _closest(step, itemsize, width) if many and on_one_block else None
    first: tuple[Config, ...] = (default,)
    if closest and _width(closest) * _WORTH_A_CLOSER_FIT <= _width(default):
        first = (closest, default)
    bucket = power_of_two(width)
    fitting = _FITTING_THREADS[step, itemsize]
    if width <= 512:
        narrow = [
            _row(threads, elements, dict(fitting).get(elements, 2048) // _NARROW_BLOCK)
            for elements in (4, 8, 16)
            for threads in (4, 8, 16, 32)
            if threads * elements == bucket and 16 <= elements * itemsize <= 64 and itemsize < 8
        ]
        return tuple(dict.fromkeys((*first, *narrow)))
    spreads = [
        _row(threads, elements, most // threads // share, cluster)
        for elements, most in fitting
        for threads in (128, 256, 512, 1024)
        for cluster in (1, 2, 4, 8, 16)
        if cluster <= (largest if itemsize < 8 else 1)
        for share in ((1, 2) if cluster == 1 else (1,))
        if threads * elements * cluster == bucket and threads * share <= most
        if most * elements <= 32768 or threads >= 512  # few with terms twice: each is compiled
    ]
    pieces = (_PIECES,) if width > 16384 else ()
    return tuple(dict.fromkeys((*first, *spreads, *pieces)))


@functools.lru_cache(1024)
def _configs(step: str, itemsize: int, width: int, device: torch.device) -> tuple[Config, ...]:
    return cuda_candidates(step, itemsize, width, _largest_cluster(width, device))


@functools.lru_cache(1024)
def _configs_of_few(
    step: str, itemsize: int, width: int, device: torch.device
) -> tuple[Config, ...]:
    return cuda_candidates(step, itemsize, width, _largest_cluster(width, device), many=False)


def _launch(step: str, form: Form, rows: Rows, tensors: tuple[Tensor, ...]) -> None:
    """Launch the kernels of one step; their arguments are the tensors, then the rows' layout."""
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
        grid = (ceil_div(rows.rows, per_block), 1, 1)
        count, width = i64(rows.rows), i64(rows.width)
        CUDA.launch(expression, grid, (block, 1, 1), (*tensors, count, width, *places))
        return
    candidates = _configs if rows.rows * rows.width >= _MANY_ELEMENTS else _configs_of_few
    config = chosen("cuda", candidates, step, form, rows, tensors)
    if "cluster" in config:
        block = config.threads if config.threads > 32 else _NARROW_BLOCK
        grid = (ceil_div(rows.rows * config.threads * config.cluster, block), 1, 1)
        shifted = _is_shifted(rows, tensors)
        if shifted:
            vectors = (16 // tensors[0].element_size(),) * len(vectors)
        expression = _resident(step, types, vectors, config, shifted)
        count, short = i64(rows.rows), i32(rows.width)
        CUDA.launch(expression, grid, (block, 1, 1), (*tensors, count, short, *places))
        return
    length = config.piece * ceil_div(rows.width, config.piece * _MOST_PIECES)
    pieces = ceil_div(rows.width, length)
    # The workspace is the maximum and the sum, or the sum, of every piece: at most 0.05 % of the
    # tensors.
    accumulated, values = (tensors[-1], 2) if step == "forward" else (tensors[0], 1)
    dtype = torch.float64 if accumulated.dtype == torch.float64 else torch.float32
    of_piece = torch.empty((rows.rows, pieces, values), dtype=dtype, device=accumulated.device)
    sizes = (i64(rows.width), i32(pieces), i64(length), *places)
    grid, threads = (rows.rows * pieces, 1, 1), (config.threads, 1, 1)
    read, apply = _in_pieces(step, types, vectors, rows.width, config)
    CUDA.launch(read, grid, threads, (*tensors[:-1], of_piece, *sizes))
    CUDA.launch(apply, grid, threads, (*tensors, of_piece, *sizes))


def _move_in_pairs(rows: Rows, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether one access can load elements of two neighbouring 16-bit columns, in every
    tensor."""
    steps = rows.inner_count, rows.outer_stride, rows.dim_stride
    pairs = all(tensor.element_size() == 2 and not tensor.data_ptr() % 16 for tensor in tensors)
    return pairs and rows.inner_stride == 1 and not any(step % 2 for step in steps)


def _form(step: str, form: Form, tensors: tuple[Tensor, ...]) -> tuple[str, ...]:
    """Return the kernels' first template arguments."""
    if step == "backward":
        return (FORMS[form],)
    return FORMS[form], "kInPlace" if tensors[0] is tensors[-1] else "kApart"


def _vectors(step: str, rows: Rows, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
    """Return the kernels' vector lengths: of all tensors and, in the backward, of grad_output."""
    if step == "forward":
        return (vector_length(rows, *tensors),)
    grad_output, output, grad_input = tensors
    contiguous = Rows(rows.rows, rows.width, 1, rows.width, 0, 1, rows.columns)
    vector = vector_length(contiguous, output, grad_input)
    return vector, vector if vector_length(rows, grad_output, grad_input) % vector == 0 else 1


def _room(itemsize: int, width: int) -> int:
    """Return the elements that threads need room for where a row of ``width`` is loaded in vectors
    that need not begin with it. The first vector then begins up to a vector less one before it.

    Without such vectors, rows of an odd width are loaded element by element. Rows of fewer than
    four vectors would have more elements outside of whole vectors than in them.
    """
    vector = 16 // itemsize
    is_odd = 2 * math.gcd(width, vector) < vector
    return width + vector - 1 if is_odd and width >= 4 * vector else width


def _is_shifted(rows: Rows, tensors: tuple[Tensor, ...]) -> bool:
    """Return whether rows of these tensors are loaded in vectors that need not begin with them: all
    are contiguous, begin on 16 bytes and have elements of one size."""
    itemsize = tensors[0].element_size()
    return (
        _room(itemsize, rows.width) > rows.width
        and rows.inner_count == rows.dim_stride == 1
        and (rows.outer_stride == rows.width or rows.rows == 1)
        and all(
            tensor.element_size() == itemsize and not tensor.data_ptr() % 16 for tensor in tensors
        )
    )


def _instance(name: str, *arguments: object) -> str:
    return f"{name}<{', '.join(map(str, arguments))}>"


def _resident(
    step: str,
    types: Sequence[str],
    vectors: tuple[int, ...],
    config: Config,
    shifted: bool = False,
) -> str:
    arguments = (*types, *vectors, config.elements // vectors[0], config.threads)
    # Elements that are read one by one, or cast, form no pairs from which terms could be computed
    # twice. They would spill 20 to 75 words, but only 3 in twice the registers.
    pairs = vectors[0] > 1 and types[-1] == types[-2]
    halved = not pairs and config.elements * config.threads * config.blocks > 32768
    arguments = (*arguments, config.blocks // 2 if halved else config.blocks)
    shift = ("true",) if shifted else ()
    if config.cluster == 1:
        return _instance(f"{step}_resident", *arguments, *shift)
    return _instance(f"{step}_cluster", *arguments, config.cluster, *shift)


def _in_pieces(
    step: str, types: Sequence[str], vectors: tuple[int, ...], width: int, config: Config
) -> tuple[str, str]:
    """Return the kernel that reads the pieces, which depends on neither the output's aliasing nor
    the gradient's type, and the kernel that applies the result."""
    index = "int64_t" if width >= 2**30 else "int32_t"
    reading = (types[0], *types[2:]) if step == "forward" else types[:-1]
    arguments = (*vectors, config.vectors, config.threads, index)
    return (
        _instance(f"{step}_pieces", *reading, *arguments),
        _instance(f"{step}_apply", *types, *arguments),
    )


def cuda_columns(rows: Rows) -> tuple[int, int, int]:
    """Return the elements per thread (0: read twice), the lanes across columns and the warps of a
    columns kernel."""
    neighbours = power_of_two(rows.inner_count)
    for elements, warps in CUDA_COLUMNS:
        for lanes in _COLUMN_LANES:
            lanes = min(lanes, neighbours) if warps else lanes  # without warps it does not matter
            if elements * (warps * (32 // lanes) or 1) >= rows.width:
                return elements, lanes, warps
    return 0, min(_COLUMN_LANES[0], neighbours), CUDA_COLUMNS[-1][1]


_LAUNCHER = Launcher(_launch)
forward, forward_in_place = _LAUNCHER.forward, _LAUNCHER.forward_in_place
backward = _LAUNCHER.backward
configs = functools.partial(forward_configs, _configs)
configs_backward = functools.partial(backward_configs, _configs)


def _representative_expressions() -> tuple[str, ...]:
    """Return the expressions of every line of the tables, and of every kernel at other types and
    vector lengths; of both forms where they differ."""
    found: list[str] = []
    for dtype, vector in ((torch.float32, 4), (torch.bfloat16, 8), (torch.float64, 2)):
        types = (CUDA_NAMES[dtype],) * 2
        for step, form, lengths in _steps(vector):
            lines = CUDA_ROWS[step, dtype.itemsize][0][3 if form[0] == "kSoftmax" else -4 :]
            found += [_resident(step, (*form, *types), lengths, line) for line in lines]
            if dtype != torch.float64:
                found += [
                    _resident(step, (*form, *types), lengths, line, True) for line in lines[::4]
                ]
            found += _in_pieces(step, (*form, *types), lengths, 2**20, _PIECES)
    for dtype, width in ((torch.bfloat16, 257), (torch.bfloat16, 1500), (torch.float32, 1023)):
        types, vector = (CUDA_NAMES[dtype],) * 2, 16 // dtype.itemsize
        for step, form, lengths in _steps(vector):
            line = cuda_candidates(step, dtype.itemsize, width, 1)[0]
            found += [_resident(step, (*form, *types), lengths, line, width % 2 == 1)]
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
