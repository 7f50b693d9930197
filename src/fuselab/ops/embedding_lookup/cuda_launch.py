"""Launchers of the CUDA C++ kernels: look-up, dense gradients, and updates in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.indices import CPP_IDS, index_type
from fuselab.ops.embedding_lookup import configs
from fuselab.ops.embedding_lookup.layout import backward_of, forward_of
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import WIDEST_UPDATE, Group, groups, too_wide
from fuselab.runtime.cuda_source import CudaSource, i32, i64
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import Scalar
from fuselab.runtime.tuning import Config

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
_CHUNKS = {16: "uint4", 8: "uint2", 4: "unsigned", 2: "unsigned short"}
_MOST_BYTES = max(_CHUNKS)
_ITEMS = 4  # kItems of cuda_kernels.cu


@forward_of
def forward(tables: Sequence[Tensor], ids: Tensor, rule: str, output: Tensor) -> None:
    """Look up all rows: one launch per 256 tables."""
    width, itemsize = tables[0].shape[1], tables[0].element_size()
    if width == 0:
        return
    for group in groups(tables, [table.shape[0] for table in tables]):
        part = ids[:, group.columns]
        step, chunks = configs.row_chunk(group, width, itemsize, output.element_size())
        lanes = min(power_of_two(chunks), 32)
        config = configs.chosen_look_up(ids, step, chunks)
        types = (
            f"{_move(step, tables[0].dtype, output.dtype)}, {CPP_IDS[ids.dtype]}, "
            f"Rule::{rule}, {lanes}"
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
                *(part, output[:, group.columns], i64(count), i32(part.shape[1]), i32(chunks)),
                *(*map(i64, part.stride()), i64(ids.shape[1] * chunks), group.description()),
            ),
            shared_bytes=ring,
        )


def _move(step: int, dtype: torch.dtype, output_dtype: torch.dtype) -> str:
    """Return the C++ functor that copies or converts ``step`` bytes of a row."""
    if output_dtype == dtype:
        return f"Copy<{_CHUNKS[step]}>"
    return f"Convert<{_CHUNKS[step]}, {CUDA_NAMES[dtype]}, {CUDA_NAMES[output_dtype]}>"


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *_: object) -> str | None:
    return too_wide(grad_output.shape[2]) if len(grad_output) else None


def change(
    how: RowUpdate,
    tables: Sequence[Tensor | None],
    rows: Sequence[int],
    states: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
) -> None:
    """Change the tables in place by ``grad_output`` (samples, tables, D); None is skipped. Sums are
    by atomics where their order may vary and their rounding does not matter, and by sorted runs in
    16 bits and under ``torch.use_deterministic_algorithms``."""
    if grad_output.numel() == 0:
        return
    if grad_output.stride(2) != 1:
        grad_output = grad_output.contiguous()
    spread = Spread.of_change(how, tables, grad_output)
    config = configs.chosen_change(how, spread, ids, grad_output, rows)
    for group in groups(tables, rows, states):
        if any(table is not None for table in group.tables):
            part = ids[:, group.columns], grad_output[:, group.columns]
            _KERNELS[config.kernel](_Change(how, group, *part, spread, config))


class _Change(NamedTuple):
    """A change of one group of tables, with its columns of the ids and of the gradient."""

    how: RowUpdate
    group: Group
    ids: Tensor
    grad_output: Tensor
    spread: Spread
    config: Config

    @property
    def types(self) -> str:
        return f"{CUDA_NAMES[self.how.dtype]}, {CUDA_NAMES[self.grad_output.dtype]}"

    def launch(
        self,
        kernel: str,
        spread: str,
        grid: tuple[int, int],
        sizes: Sequence[i32 | i64],
        numbers: Sequence[Tensor | Scalar | None],
        shared_bytes: int = 0,
    ) -> None:
        """Launch a kernel that reads ids and gradients; ``grid`` is blocks and threads of each."""
        strides = map(i64, (*self.ids.stride(), *self.grad_output.stride()[:2]))
        CUDA.launch(
            f"{kernel}<{self.types}, {CPP_IDS[self.ids.dtype]}, {self.how.rule}, "
            f"Update::{self.how.update}, {spread}, {self.group.capacity}>",
            (grid[0], 1, 1),
            (grid[1], 1, 1),
            (self.ids, self.grad_output, *sizes, *strides, *numbers, self.group.description()),
            shared_bytes=shared_bytes,
        )


def _scatter(of: _Change) -> None:
    batch, tables, width = of.grad_output.shape
    grid = (tables * ceil_div(batch, configs.THREADS), configs.THREADS)
    sizes = (i64(batch), i32(tables), i32(width))
    of.launch("scatter", str(of.spread), grid, sizes, of.how.numbers()[:2])


def _scatter_samples(of: _Change) -> None:
    (batch, tables, width), spread = of.grad_output.shape, of.spread
    most_rows, summed, shared = configs.shared_sums(
        of.how, spread, of.ids, of.grad_output, of.group.rows
    )
    grid = configs.samples_shape(of.ids, spread.lanes)
    sizes = (i64(batch), i32(tables), i32(width))
    numbers = (*of.how.numbers()[:2], i32(most_rows), i32(summed))
    lanes = f"{spread.vector}, {spread.lanes}"
    of.launch("scatter_samples", lanes, grid, sizes, numbers, shared)


def _sort_and_reduce(of: _Change) -> None:
    """Sort the positions by row, sum runs of equal rows, and change each row once. The workspace is
    24 bytes per id, half of them for the sort, and 8 D bytes per ``config.run`` ids for partial
    sums."""
    how, group, ids, grad_output, spread, config = of
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
            *(ids, keys, i64(positions), i32(tables), i64(group.all_rows)),
            *(*map(i64, ids.stride()), description),
        ),
    )
    keys, order = torch.sort(keys, stable=True)
    pieces = ceil_div(positions, config.run)
    heads, tails = grad_output.new_empty((2, pieces, width), dtype=how.compute_dtype)
    arguments = f"{key}, Update::{how.update}, {spread}, {config.run}, {group.capacity}"
    sizes = (i64(positions), i32(tables), i32(width), i64(group.all_rows))
    strides, numbers = map(i64, grad_output.stride()[:2]), (*how.numbers(), description)
    CUDA.launch(
        f"reduce_runs<{of.types}, {arguments}>",
        (ceil_div(pieces * spread.lanes, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (keys, order, grad_output, heads, tails, *sizes, *strides, *numbers),
    )
    CUDA.launch(
        f"join_runs<{CUDA_NAMES[how.dtype]}, {arguments}>",
        (ceil_div(pieces * 32, configs.THREADS), 1, 1),
        (configs.THREADS, 1, 1),
        (keys, order, heads, tails, *sizes, *numbers),
    )


def _update_tables(of: _Change) -> None:
    batch, tables, width = of.grad_output.shape
    size = configs.table_size(batch)
    lanes = f"{of.spread.vector}, {of.spread.lanes}, {size}"
    grid, sizes = (tables, configs.table_threads(size)), (i32(batch), i32(width))
    shared = configs.table_bytes(of.how, size, of.spread, width)
    of.launch("update_tables", lanes, grid, sizes, of.how.numbers(), shared)


_KERNELS = {
    "scatter": _scatter,
    "samples": _scatter_samples,
    "sorted": _sort_and_reduce,
    "table": _update_tables,
}


backward = backward_of(change)


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
