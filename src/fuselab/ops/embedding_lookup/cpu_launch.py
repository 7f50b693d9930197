"""Launchers of the C++ kernels: look-up, dense gradients, and updates in place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.indices import CPP_IDS
from fuselab.ops.embedding_lookup.layout import backward_of, forward_of
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import MOST, groups
from fuselab.runtime.cpp_source import CppSource, f32, f64, i64
from fuselab.runtime.grid import ceil_div

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_TYPES = {
    torch.float32: "float",
    torch.float16: "_Float16",
    torch.bfloat16: "bfloat16",
    torch.float64: "double",
}


@forward_of
def forward(tables: Sequence[Tensor], ids: Tensor, rule: str, output: Tensor) -> None:
    """Look up all rows: one launch per 256 tables."""
    width = tables[0].shape[1]
    types = f"{_TYPES[tables[0].dtype]}, {_TYPES[output.dtype]}"
    if output.dtype == tables[0].dtype:
        types, width = "char, char", width * output.element_size()  # plain bytes are copied
    for group in groups(tables, [table.shape[0] for table in tables]):
        part, vectors = ids[:, group.columns], output[:, group.columns]
        numbers = (*part.shape, width, *part.stride(), ids.shape[1] * width, group.columns.start)
        CPP.launch(
            f"look_up<{types}, {CPP_IDS[ids.dtype]}, Rule::{rule}>",
            (part, vectors, *map(i64, numbers), group.description(MOST)),
        )


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
        numbers = map(i64, (*part.shape, *part.stride(), group.columns.start))
        expression = f"check_group<{CPP_IDS[ids.dtype]}, {how.rule}>"
        CPP.launch(expression, (part, *numbers, group.description(MOST)))
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
                *map(i64, (*grads.shape, *part.stride(), *grads.stride()[:2])),
                *(number(float(how.learning_rate)), number(float(how.eps))),
                *map(i64, (parts, group.columns.start)),
                group.description(MOST),
            ),
        )


backward = backward_of(change)
