"""Launchers of the Triton kernels: look-up, dense gradients, and updates in place.

Gradients always go through sorted runs here, so that their order is fixed; only cuda_launch has
atomics.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup import triton_kernels
from fuselab.ops.embedding_lookup.layout import backward_of, forward_of
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import (
    alignment,
    scattered,
    tables_too_wide,
    too_wide,
)
from fuselab.ops.embedding_lookup.validation import rule
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.triton_launch import launch

MOST_TABLES = 128  # a program finds its table by comparing with every one
_LOOKUP_ELEMENTS = 2048  # in a program's tile
_KEYS = 256
_TILE = 512  # of reduce_runs: RUN positions by WIDTH columns


def _too_many(tables: int) -> str | None:
    return f"there are more than {MOST_TABLES} tables" if tables > MOST_TABLES else None


def supports(tables: Sequence[Tensor], *_: object) -> str | None:
    return _too_many(len(tables)) or scattered(tables)


def supports_update(tables: Sequence[Tensor], *_: object) -> str | None:
    return tables_too_wide(tables) or supports(tables)


def _divisors(tables: Sequence[Tensor]) -> dict[str, int]:
    """Return the constants BYTES and ELEMENTS of the kernels."""
    itemsize = tables[0].element_size()
    places = [table.data_ptr() for table in tables]
    step = alignment(*places, *(table.stride(0) * itemsize for table in tables))
    return {"BYTES": step, "ELEMENTS": max(step // itemsize, 1)}


@forward_of
def forward(tables: Sequence[Tensor], ids: Tensor, rule: str, output: Tensor) -> None:
    """Look up all rows in one launch, with a program for every BLOCK samples of every table."""
    batch, width = ids.shape[0], tables[0].shape[1]
    if width == 0:
        return
    columns = power_of_two(width, 16, 128)
    block = _LOOKUP_ELEMENTS // columns
    launch(
        triton_kernels.look_up,
        (ceil_div(batch, block), len(tables), ceil_div(width, columns)),
        tuple(tables),
        tuple(table.stride(0) for table in tables),
        tuple(table.shape[0] for table in tables),
        *(ids, output, batch, width, *ids.stride()),
        RULE=rule,
        TABLES=len(tables),
        BLOCK=block,
        WIDTH=columns,
        **_divisors(tables),
    )


def supports_backward(
    needs: Sequence[bool], grad_output: Tensor, ids: Tensor, rows: Sequence[int], *_: object
) -> str | None:
    return _too_many(len(rows)) or too_wide(grad_output.shape[2])


def change(
    how: RowUpdate,
    tables: Sequence[Tensor],
    rows: Sequence[int],
    states: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
) -> None:
    """Change the tables in place by ``grad_output`` (samples, tables, D)."""
    if grad_output.numel() == 0:
        return
    if grad_output.stride(2) != 1:
        grad_output = grad_output.contiguous()
    positions, width, all_rows = ids.numel(), grad_output.shape[2], sum(rows)
    dtype = how.compute_dtype
    first = tuple([0, *accumulate(rows)][:-1])
    keys = ids.new_empty(positions, dtype=torch.int32 if all_rows < 2**31 - 1 else torch.int64)
    launch(
        triton_kernels.key_positions,
        (ceil_div(positions, _KEYS),),
        *(tuple(rows), first, ids, keys, positions, all_rows, *ids.stride()),
        RULE=rule(how.out_of_range, how.hash),
        TABLES=len(tables),
        BLOCK=_KEYS,
    )
    keys, order = torch.sort(keys, stable=True)
    columns = power_of_two(width, 16)  # powers of two only, for each shape compiles a kernel
    run = max(_TILE // columns, 8)
    pieces = ceil_div(positions, run)
    heads, tails = grad_output.new_empty((2, pieces, width), dtype=dtype)
    numbers = [
        number.to(dtype) if isinstance(number, Tensor) else keys.new_full((), number, dtype=dtype)
        for number in (how.learning_rate, how.eps)
    ]
    described = (
        tuple(tables),
        tuple(table.stride(0) for table in tables),
        first,
        tuple(states) or tuple(tables),  # a kernel's tuple is never empty
    )
    options: dict[str, Any] = {"UPDATE": how.update, "TABLES": len(tables), "RUN": run}
    options |= {"WIDTH": columns, **_divisors(tables)}
    launch(
        triton_kernels.reduce_runs,
        (pieces,),
        *(*described, keys, order, grad_output, heads, tails, *numbers),
        *(positions, width, all_rows, *grad_output.stride()[:2]),
        **options,
        num_warps=2 if columns <= 64 else 4,
    )
    launch(
        triton_kernels.join_runs,
        (pieces,),
        *(*described, keys, order, heads, tails, *numbers, positions, width, all_rows),
        **options,
        PIECES=max(1024 // columns, 1),
        num_warps=1 if columns <= 64 else 4,
    )


# The gradients of all tables are computed; those that are not needed are dropped.
backward = backward_of(change, all_tables=True)
