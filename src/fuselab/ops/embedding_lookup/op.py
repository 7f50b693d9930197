"""The contract of ``fuselab::embedding_lookup``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Cost, FusedOp, Gradient
from fuselab.ops._shared.dtypes import FLOATING, check_floating
from fuselab.ops._shared.launched import launched
from fuselab.ops.embedding_lookup import (
    cases,
    configs,
    cpu_launch,
    cuda_launch,
    reference,
    triton_launch,
)
from fuselab.ops.embedding_lookup.layout import empty_output
from fuselab.ops.embedding_lookup.rewrites import rewrites
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import groups, scattered
from fuselab.ops.embedding_lookup.validation import check_ids, check_tables
from fuselab.runtime.tuning import Config


def validate(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> None:
    """Raise ArgumentError, ShapeError, DtypeError or UnknownNameError as the reference says."""
    check_tables("embedding_lookup", tables)
    check_ids("embedding_lookup", tables, ids, out_of_range, hash)
    check_floating("embedding_lookup", dtype=dtype)


def fake(tables: Sequence[Tensor], ids: Tensor, *rules_and_dtype: Any) -> Tensor:
    return empty_output(tables, ids, rules_and_dtype[-1])


def supports(tables: Sequence[Tensor], *_: object) -> str | None:
    return scattered(tables)


def save(
    output: Tensor, tables: Sequence[Tensor], ids: Tensor, *rules_and_dtype: Any
) -> tuple[Any, ...]:
    """Keep the ids and, of the tables, only their lengths and dtype: the gradient does not depend
    on the tables' values."""
    rows = tuple(table.shape[0] for table in tables)
    return ids, rows, *rules_and_dtype[:-1], tables[0].dtype


def fake_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    *rules_and_dtype: Any,
) -> tuple[Tensor | None, ...]:
    width, dtype = grad_output.shape[2], rules_and_dtype[-1]
    grads = (
        grad_output.new_empty((count, width), dtype=dtype) if need else None
        for need, count in zip(needs, rows, strict=False)
    )
    return *grads, None


def prefer(tables: Sequence[Tensor], ids: Tensor, *_: object) -> Sequence[str]:
    """Return the CUDA kernels first: on an H200 they are faster than Triton's (57 us for 67 with
    65536 samples of Kaggle's 26 tables x 16 float32), and eager takes nine times as long."""
    return ("cuda", "triton")


def prefer_backward(needs: Sequence[bool], grad_output: Tensor, *_: object) -> Sequence[str]:
    """Return the same order as ``prefer`` on a GPU. Most of the time goes into zeroing the dense
    gradients."""
    return ("cuda", "triton") if grad_output.is_cuda else ("cpp",)


def configs_forward(
    tables: Sequence[Tensor], ids: Tensor, *rules_and_dtype: Any
) -> Sequence[Config]:
    group = next(groups(tables, [table.shape[0] for table in tables]))
    width, itemsize = tables[0].shape[1], tables[0].element_size()
    output_itemsize = (rules_and_dtype[-1] or tables[0].dtype).itemsize
    chunk = configs.row_chunk(group, width, itemsize, output_itemsize)
    return configs.look_up(ids, *chunk)


def configs_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    *rules_and_dtype: Any,
) -> Sequence[Config]:
    *rules, table_dtype = rules_and_dtype
    # A fresh tensor is aligned as the gradients will be.
    fresh = grad_output.new_empty((1, grad_output.shape[2]), dtype=table_dtype)
    how = RowUpdate("gradient", table_dtype, *rules)
    spread = Spread.of_change(how, [fresh], grad_output)
    return configs.change(how, spread, ids, grad_output, rows)


def cost(tables: Sequence[Tensor], ids: Tensor, *rules_and_dtype: Any) -> Cost:
    """Return the least traffic: every id read once, every selected row read once (as if no id came
    twice, but at most all rows), every vector written once."""
    row_bytes = tables[0].shape[1] * tables[0].element_size()
    rows = sum(min(ids.shape[0], table.shape[0]) for table in tables)
    read = ids.numel() * ids.element_size() + rows * row_bytes
    vector_bytes = tables[0].shape[1] * (rules_and_dtype[-1] or tables[0].dtype).itemsize
    return Cost(read, ids.numel() * vector_bytes, 0)


def cost_backward(tables: Sequence[Tensor], ids: Tensor, *rules_and_dtype: Any) -> Cost:
    """Return the least traffic: ids and upstream gradients read once, all rows of all tables
    written once; and one addition per element."""
    width = tables[0].shape[1]
    vector_bytes = width * (rules_and_dtype[-1] or tables[0].dtype).itemsize
    read = ids.numel() * (ids.element_size() + vector_bytes)
    rows = sum(table.shape[0] for table in tables)
    return Cost(read, rows * width * tables[0].element_size(), ids.numel() * width)


OP = FusedOp(
    name="fuselab::embedding_lookup",
    reference=reference.embedding_lookup,
    implementations={
        "cuda": launched("cuda", cuda_launch, supports=supports),
        "triton": launched("cuda", triton_launch),
        "cpp": launched("cpu", cpu_launch, supports=supports),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=cases.CASES,
    gradient=Gradient(save, reference.embedding_lookup_backward, fake_gradient, prefer_backward),
    draw=cases.draw,
    space=cases.space,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=cases.CPU_CASES,
    rewrites=tuple(rewrites()),
    peers={"per_table": reference.per_table},
    dtypes=FLOATING,
    configs={"cuda": configs_forward, "cuda_backward": configs_backward},
    nondeterministic="the CUDA kernels add gradients of equal ids by atomics (float32, float64)",
)
