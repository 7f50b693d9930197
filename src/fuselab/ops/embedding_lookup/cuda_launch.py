"""Launchers of the CUDA C++ kernels: look-up, dense gradients, and updates in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.indices import CPP_IDS, index_type
from fuselab.ops.embedding_lookup import configs
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import Group, groups
from fuselab.ops.embedding_lookup.validation import rule
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_CHUNKS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}
_MOST_BYTES = max(_CHUNKS)
_ITEMS = 4  # kItems of cuda_kernels.cu
WIDEST_UPDATE = 1024  # columns that fit in a warp's registers


def forward(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    """Look up all rows: one launch per 256 tables."""
    width, itemsize = tables[0].shape[1], tables[0].element_size()
    output = tables[0].new_empty((*ids.shape, width), dtype=dtype)
    if output.numel() == 0:
        return output
    for group in groups(tables, [table.shape[0] for table in tables]):
        part = ids[:, group.columns]
        step, chunks = configs.row_chunk(group, width, itemsize, output.element_size())
        lanes = min(power_of_two(chunks), 32)
        config = configs.chosen_look_up(ids, step, chunks)
        types = (
            f"{_move(step, tables[0].dtype, output.dtype)}, {CPP_IDS[ids.dtype]}, "
            f"Rule::{rule(out_of_range, hash)}, {lanes}"
        )
        if config.kernel == "samples":
            kernel = f"look_up_samples<{types}, {group.capacity}>"
            blocks, threads = configs.samples_shape(part, lanes)
            count, ring = part.shape[0], configs.ring_bytes(step, ids)
        else:
            kernel = f"look_up<{types}, {group.capacity}, {index_type(part.numel())}>"
            blocks = ceil_div(part.numel(), configs.THREADS // lanes * _ITEMS)
            threads, count, ring = configs.THREADS, part.numel(), 0
        CUDA.launch(
            kernel,
            (blocks, 1, 1),
            (threads, 1, 1),
            (
                part,
                output[:, group.columns],
                i64(count),
                i32(part.shape[1]),
                i32(chunks),
                *map(i64, part.stride()),
                i64(ids.shape[1] * chunks),
                group.description(),
            ),
            shared_bytes=ring,
        )
    return output


def _move(step: int, dtype: torch.dtype, output_dtype: torch.dtype) -> str:
    """Return the C++ functor that copies or converts ``step`` bytes of a row."""
    if output_dtype == dtype:
        return f"Copy<{_CHUNKS[step]}>"
    return f"Convert<{_CHUNKS[step]}, {CUDA_NAMES[dtype]}, {CUDA_NAMES[output_dtype]}>"


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    out_of_range: str,
    hash: str | None,
    table_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return dense gradients: zeros everywhere but in the rows that an id selects. Sums are by
    atomics where their order may vary and their rounding does not matter, and by sorted runs in
    16 bits and under ``torch.use_deterministic_algorithms``."""
    width = grad_output.shape[2]
    grads = [
        grad_output.new_zeros((count, width), dtype=table_dtype) if need else None
        for need, count in zip(needs, rows, strict=False)
    ]
    change(
        RowUpdate("gradient", table_dtype, out_of_range, hash), grads, rows, (), ids, grad_output
    )
    return (*grads, None)


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *_: object) -> str | None:
    return too_wide((grad_output[0],)) if len(grad_output) else None


def too_wide(tables: Sequence[Tensor]) -> str | None:
    """Return the reason why rows of these widths cannot be changed, or None."""
    if any(table.dim() == 2 and table.shape[1] > WIDEST_UPDATE for table in tables):
        return f"rows are wider than {WIDEST_UPDATE}"
    return None


def change(
    how: RowUpdate,
    tables: Sequence[Tensor | None],
    rows: Sequence[int],
    states: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
) -> None:
    """Change the tables in place by ``grad_output`` (samples, tables, D); None is skipped."""
    if grad_output.numel() == 0:
        return
    if grad_output.stride(2) != 1:
        grad_output = grad_output.contiguous()
    spread = Spread.of_change(how, tables, grad_output)
    config = configs.chosen_change(how, spread, ids, grad_output, rows)
    for group in groups(tables, rows, states):
        if any(table is not None for table in group.tables):
            part = ids[:, group.columns], grad_output[:, group.columns]
            _KERNELS[config.kernel](how, group, *part, spread, config)


def _scatter(
    how: RowUpdate, group: Group, ids: Tensor, grad_output: Tensor, spread: Spread, config: Config
) -> None:
    batch, tables, width = grad_output.shape
    CUDA.launch(
        f"scatter<{_types(how, grad_output)}, {CPP_IDS[ids.dtype]}, {how.rule}, "
        f"Update::{how.update}, {spread}, {group.capacity}>",
        (tables * ceil_div(batch, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (
            ids,
            grad_output,
            i64(batch),
            i32(tables),
            i32(width),
            *map(i64, ids.stride()),
            *map(i64, grad_output.stride()[:2]),
            *how.numbers()[:2],
            group.description(),
        ),
    )


def _scatter_samples(
    how: RowUpdate, group: Group, ids: Tensor, grad_output: Tensor, spread: Spread, config: Config
) -> None:
    batch, tables, width = grad_output.shape
    most_rows, summed, shared = configs.shared_sums(how, spread, ids, grad_output, group.rows)
    blocks, threads = configs.samples_shape(ids, spread.lanes)
    CUDA.launch(
        f"scatter_samples<{_types(how, grad_output)}, {CPP_IDS[ids.dtype]}, {how.rule}, "
        f"Update::{how.update}, {spread.vector}, {spread.lanes}, {group.capacity}>",
        (blocks, 1, 1),
        (threads, 1, 1),
        (
            ids,
            grad_output,
            i64(batch),
            i32(tables),
            i32(width),
            *map(i64, ids.stride()),
            *map(i64, grad_output.stride()[:2]),
            *how.numbers()[:2],
            i32(most_rows),
            i32(summed),
            group.description(),
        ),
        shared_bytes=shared,
    )


def _sort_and_reduce(
    how: RowUpdate, group: Group, ids: Tensor, grad_output: Tensor, spread: Spread, config: Config
) -> None:
    """Sort the positions by row, sum runs of equal rows, and change each row once. The workspace is
    24 bytes per id, half of them for the sort, and 8 D bytes per ``config.run`` ids for partial
    sums."""
    positions, tables, width = ids.numel(), ids.shape[1], grad_output.shape[2]
    short = group.all_rows < 2**31 - 1
    keys = ids.new_empty(positions, dtype=torch.int32 if short else torch.int64)
    key = CPP_IDS[keys.dtype]
    description = group.description()
    CUDA.launch(
        f"key_positions<{CPP_IDS[ids.dtype]}, {key}, {how.rule}, {group.capacity}>",
        (ceil_div(positions, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (
            ids,
            keys,
            i64(positions),
            i32(tables),
            i64(group.all_rows),
            *map(i64, ids.stride()),
            description,
        ),
    )
    keys, order = torch.sort(keys, stable=True)
    pieces = ceil_div(positions, config.run)
    heads, tails = grad_output.new_empty((2, pieces, width), dtype=how.compute_dtype)
    arguments = f"{key}, Update::{how.update}, {spread}, {config.run}, {group.capacity}"
    sizes = (i64(positions), i32(tables), i32(width), i64(group.all_rows))
    numbers = (*how.numbers(), description)
    CUDA.launch(
        f"reduce_runs<{_types(how, grad_output)}, {arguments}>",
        (ceil_div(pieces * spread.lanes, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (keys, order, grad_output, heads, tails, *sizes, *_strides(grad_output), *numbers),
    )
    CUDA.launch(
        f"join_runs<{CUDA_NAMES[how.dtype]}, {arguments}>",
        (ceil_div(pieces * 32, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (keys, order, heads, tails, *sizes, *numbers),
    )


def _update_tables(
    how: RowUpdate, group: Group, ids: Tensor, grad_output: Tensor, spread: Spread, config: Config
) -> None:
    batch, tables, width = grad_output.shape
    size = configs.table_size(batch)
    CUDA.launch(
        f"update_tables<{_types(how, grad_output)}, {CPP_IDS[ids.dtype]}, {how.rule}, "
        f"Update::{how.update}, {spread.vector}, {spread.lanes}, {size}, {group.capacity}>",
        (tables, 1, 1),
        (configs.table_threads(size), 1, 1),
        (
            ids,
            grad_output,
            i32(batch),
            i32(width),
            *map(i64, ids.stride()),
            *map(i64, grad_output.stride()[:2]),
            *how.numbers(),
            group.description(),
        ),
        shared_bytes=configs.table_bytes(how, size, spread, width),
    )


_KERNELS = {
    "scatter": _scatter,
    "samples": _scatter_samples,
    "sorted": _sort_and_reduce,
    "table": _update_tables,
}


def _types(how: RowUpdate, grad_output: Tensor) -> str:
    return f"{CUDA_NAMES[how.dtype]}, {CUDA_NAMES[grad_output.dtype]}"


def _strides(grad_output: Tensor) -> list[i64]:
    return [i64(stride) for stride in grad_output.stride()[:2]]


def _representative_expressions() -> Iterator[str]:
    """Yield every kernel in every dtype for rows of 16, and one each for narrow and wide rows."""
    for place, (dtype, name) in enumerate(CUDA_NAMES.items()):
        ids = tuple(CPP_IDS.values())[place % 2]
        narrow = Spread.of(7, dtype.itemsize, dtype.itemsize)
        wide = Spread.of(WIDEST_UPDATE, dtype.itemsize, 16)
        usual = Spread.of(16, dtype.itemsize, 16)
        updates = ("gradient", "sgd", "rowwise_adagrad")
        for update, spread in (*((update, usual) for update in updates), ("sgd", narrow)):
            for run in configs.RUNS if name == "float" else configs.RUNS[:1]:
                yield f"reduce_runs<{name}, {name}, {ids}, Update::{update}, {spread}, {run}, 32>"
                yield f"join_runs<{name}, {ids}, Update::{update}, {spread}, {run}, 32>"
        yield f"reduce_runs<{name}, {name}, {ids}, Update::sgd, {wide}, {configs.RUNS[0]}, 256>"
        if dtype.itemsize >= 4:
            for spread in (usual, narrow, wide):
                yield f"scatter<{name}, {name}, {ids}, Rule::modulus, Update::sgd, {spread}, 32>"
    float_from_half = ("float, __nv_bfloat16", "float, __half")
    for types, vector in (*((types, 4) for types in float_from_half), ("double, float", 2)):
        spread = Spread.by_vector(16, vector)
        yield f"scatter<{types}, int64_t, Rule::error, Update::gradient, {spread}, 32>"
    for types, vector in ((float_from_half[0], 4), ("__half, float", 4), ("__half, double", 2)):
        spread = Spread.by_vector(16, vector)
        yield f"reduce_runs<{types}, int32_t, Update::rowwise_adagrad, {spread}, 32, 32>"
    yield "scatter_samples<float, float, int64_t, Rule::error, Update::sgd, 4, 4, 32>"
    yield "scatter_samples<double, float, int32_t, Rule::ignore, Update::gradient, 1, 8, 256>"
    yield "look_up_samples<Copy<uint4>, int64_t, Rule::error, 4, 32>"
    yield "look_up_samples<Convert<uint4, float, __nv_bfloat16>, int32_t, Rule::ignore, 4, 256>"
    for meaning in ("error", "clamp", "ignore", "modulus"):
        yield f"key_positions<int64_t, int32_t, Rule::{meaning}, 32>"
        yield f"look_up<Copy<uint4>, int64_t, Rule::{meaning}, 4, 32, int32_t>"
    for size in (64, 2048):
        for update in ("gradient", "sgd", "rowwise_adagrad"):
            yield (
                f"update_tables<float, float, int64_t, Rule::error, Update::{update}, "
                f"4, 4, {size}, 32>"
            )
    yield "update_tables<__half, __half, int32_t, Rule::ignore, Update::sgd, 8, 2, 4096, 256>"
    yield "update_tables<__nv_bfloat16, float, int32_t, Rule::clamp, Update::sgd, 1, 8, 512, 256>"
    yield (
        "update_tables<double, double, int64_t, Rule::modulus, Update::rowwise_adagrad, "
        "2, 8, 1024, 32>"
    )
    for chunk in _CHUNKS.values():
        yield f"look_up<Copy<{chunk}>, int32_t, Rule::modulus, 4, 256, int64_t>"
    for dtype, output_dtype in permutations(CUDA_NAMES, 2):
        step = min(_MOST_BYTES, dtype.itemsize * _MOST_BYTES // output_dtype.itemsize)
        move = _move(step, dtype, output_dtype)
        yield f"look_up<{move}, int64_t, Rule::error, 4, 32, int32_t>"


CUDA_EXPRESSIONS = tuple(_representative_expressions())
