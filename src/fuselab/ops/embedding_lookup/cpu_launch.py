"""Launchers of the C++ kernels: look-up, dense gradients, and updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.indices import CPP_IDS
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import MOST, groups
from fuselab.ops.embedding_lookup.validation import rule
from fuselab.runtime.cpp_source import CppSource, f32, f64, i64
from fuselab.runtime.grid import ceil_div

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_TYPES = {
    torch.float32: "float",
    torch.float16: "_Float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "double",
}


def forward(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    width = tables[0].shape[1]
    output = tables[0].new_empty((*ids.shape, width), dtype=dtype)
    types = f"{_TYPES[tables[0].dtype]}, {_TYPES[output.dtype]}"
    if output.dtype == tables[0].dtype:
        types, width = "char, char", width * output.element_size()  # plain bytes are copied
    if ids.numel() == 0:
        return output
    for group in groups(tables, [table.shape[0] for table in tables]):
        part = ids[:, group.columns]
        CPP.launch(
            f"look_up<{types}, {CPP_IDS[ids.dtype]}, Rule::{rule(out_of_range, hash)}>",
            (
                part,
                output[:, group.columns],
                *map(i64, part.shape),
                i64(width),
                *map(i64, part.stride()),
                i64(ids.shape[1] * width),
                i64(group.columns.start),
                group.description(MOST),
            ),
        )
    return output


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    out_of_range: str,
    hash: str | None,
    table_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return dense gradients: zeros everywhere but in the rows that an id selects."""
    width = grad_output.shape[2]
    grads = [
        grad_output.new_zeros((count, width), dtype=table_dtype) if need else None
        for need, count in zip(needs, rows, strict=False)
    ]
    change(
        RowUpdate("gradient", table_dtype, out_of_range, hash), grads, rows, (), ids, grad_output
    )
    return (*grads, None)


def change(
    how: RowUpdate,
    tables: Sequence[Tensor | None],
    rows: Sequence[int],
    states: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
) -> None:
    """Change the tables in place by ``grad_output`` (samples, tables, D); None is skipped."""
    if ids.numel() == 0:
        return
    if grad_output.stride(2) != 1:
        grad_output = grad_output.contiguous()
    number = f64 if how.dtype == torch.float64 else f32
    grouped = list(groups(tables, rows, states))
    for group in grouped if len(grouped) > 1 else ():
        part = ids[:, group.columns]
        CPP.launch(
            f"check_group<{CPP_IDS[ids.dtype]}, {how.rule}>",
            (
                part,
                *map(i64, (*part.shape, *part.stride(), group.columns.start)),
                group.description(MOST),
            ),
        )
    for group in grouped:
        part, grads = ids[:, group.columns], grad_output[:, group.columns]
        # Two tasks per thread, so that no thread waits long for the one with the largest table.
        parts = ceil_div(2 * torch.get_num_threads(), part.shape[1])
        CPP.launch(
            f"change<{_TYPES[how.dtype]}, {_TYPES[grads.dtype]}, {CPP_IDS[ids.dtype]}, "
            f"{how.rule}, Update::{how.update}>",
            (
                part,
                grads,
                *map(i64, grads.shape),
                *map(i64, part.stride()),
                *map(i64, grads.stride()[:2]),
                number(float(how.learning_rate)),
                number(float(how.eps)),
                i64(parts),
                i64(group.columns.start),
                group.description(MOST),
            ),
        )
