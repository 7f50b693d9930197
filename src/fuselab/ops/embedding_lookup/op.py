"""The contract of ``fuselab::embedding_lookup``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES
from fuselab.ops._shared.dtypes import FLOATING, check_floating
from fuselab.ops.embedding_lookup import configs, cpu_launch, cuda_launch, reference, triton_launch
from fuselab.ops.embedding_lookup.inputs import (
    TIMED,
    TIMED_IN_EVERY_DTYPE,
    TIMED_ON_CPU,
    case_name,
    draw_look_up,
    tables_and_ids,
)
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
    """Raises ArgumentError, ShapeError, DtypeError, UnknownNameError as the docstring says."""
    check_tables("embedding_lookup", tables)
    check_ids("embedding_lookup", tables, ids, out_of_range, hash)
    check_floating("embedding_lookup", dtype=dtype)


def fake(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Tensor:
    return tables[0].new_empty((*ids.shape, tables[0].shape[1]), dtype=dtype)


def supports(tables: Sequence[Tensor], *_: object) -> str | None:
    return scattered(tables)


def save(
    output: Tensor,
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> tuple[Tensor, tuple[int, ...], str, str | None, torch.dtype]:
    """Of the tables only lengths and dtype: the gradient does not depend on what is in them."""
    rows = tuple(table.shape[0] for table in tables)
    return ids, rows, out_of_range, hash, tables[0].dtype


def fake_gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    out_of_range: str,
    hash: str | None,
    table_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    width = grad_output.shape[2]
    return (
        *(
            grad_output.new_empty((count, width), dtype=table_dtype) if need else None
            for need, count in zip(needs, rows, strict=False)
        ),
        None,
    )


def prefer(tables: Sequence[Tensor], ids: Tensor, *_: object) -> Sequence[str]:
    """65536 ids of Kaggle's 26 tables x 16 float32: CUDA 57 us, Triton 67, eager 536 (H200)."""
    return ("cuda", "triton")


def prefer_backward(needs: Sequence[bool], grad_output: Tensor, *_: object) -> Sequence[str]:
    """As ``prefer``: with the forward 669 us, 922 and 9405, most of it 2 GB of zeros."""
    return ("cuda", "triton") if grad_output.is_cuda else ("cpp",)


def configs_forward(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Sequence[Config]:
    group = next(groups(tables, [table.shape[0] for table in tables]))
    width, itemsize = tables[0].shape[1], tables[0].element_size()
    output_itemsize = (dtype or tables[0].dtype).itemsize
    chunk = configs.row_chunk(group, width, itemsize, output_itemsize)
    return configs.look_up(ids, *chunk)


def configs_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    out_of_range: str,
    hash: str | None,
    table_dtype: torch.dtype,
) -> Sequence[Config]:
    # A fresh tensor is aligned as the gradients will be.
    fresh = grad_output.new_empty((1, grad_output.shape[2]), dtype=table_dtype)
    how = RowUpdate("gradient", table_dtype, out_of_range, hash)
    spread = Spread.of_change(how, [fresh], grad_output)
    return configs.change(how, spread, ids, grad_output, rows)


def cost(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Cost:
    """Every id read once, every row met once (as if no id came twice, but at most all rows), every
    vector written once."""
    row_bytes = tables[0].shape[1] * tables[0].element_size()
    rows = sum(min(ids.shape[0], table.shape[0]) for table in tables)
    read = ids.numel() * ids.element_size() + rows * row_bytes
    vector_bytes = tables[0].shape[1] * (dtype or tables[0].dtype).itemsize
    return Cost(read, ids.numel() * vector_bytes, 0)


def cost_backward(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str,
    hash: str | None,
    dtype: torch.dtype | None,
) -> Cost:
    """Every id and every upstream gradient read once, all rows of all tables written once; one
    addition per element."""
    width = tables[0].shape[1]
    read = ids.numel() * (ids.element_size() + width * (dtype or tables[0].dtype).itemsize)
    rows = sum(table.shape[0] for table in tables)
    return Cost(read, rows * width * tables[0].element_size(), ids.numel() * width)


def _case(batch: int, sizes: Sequence[int], width: int, *tags: str, **kwargs: Any) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        strayed = bool(kwargs.keys() - {"dtype"})
        tables, ids = tables_and_ids(batch, sizes, width, device, dtype, generator, strayed)
        return Inputs((tables, ids), kwargs)

    return Case(case_name(batch, sizes, width, kwargs), make, frozenset(tags))


_SMALL = (3, 1, 105, 27, 5000)
CPU_CASES = (
    *(_case(*case, *cpu_sizes.ROW) for case in TIMED_ON_CPU),
    *(_case(*case, *cpu_sizes.DTYPES) for case in TIMED_IN_EVERY_DTYPE),
)
CASES = (
    *(_case(batch, sizes, 16, "bench", "sweep", *tags) for batch, sizes, tags in TIMED),
    _case(65536, KAGGLE_CARDINALITIES, 16, "bench", "huge", dtype=torch.bfloat16),
    *(_case(7, _SMALL, width, "boundary") for width in (1, 2, 3, 4, 7, 8, 16, 17, 127, 128, 129)),
    *(_case(batch, _SMALL, 16, "boundary") for batch in (0, 1, 2, 51, 52, 255, 256, 257)),
    *(_case(100, _SMALL, 16, "boundary", out_of_range=rule) for rule in ("clamp", "ignore")),
    _case(100, _SMALL, 16, "boundary", hash="modulus"),
    *(_case(100, _SMALL, 16, "boundary", dtype=dtype) for dtype in FLOATING),
    _case(100, _SMALL, 17, "boundary", dtype=torch.bfloat16),
    _case(5, (4,) * 33, 4, "boundary"),
    _case(3, (4,) * 257, 4, "boundary"),
    _case(40, (1,), 1200, "boundary"),
)


OP = FusedOp(
    name="fuselab::embedding_lookup",
    reference=reference.embedding_lookup,
    implementations={
        "cuda": Implementation(
            "cuda",
            cuda_launch.forward,
            cuda_launch.backward,
            supports,
            cuda_launch.supports_backward,
        ),
        "triton": Implementation(
            "cuda",
            triton_launch.forward,
            triton_launch.backward,
            triton_launch.supports,
            triton_launch.supports_backward,
        ),
        "cpp": Implementation("cpu", cpu_launch.forward, cpu_launch.backward, supports),
    },
    cost=cost,
    cost_backward=cost_backward,
    cases=CASES,
    gradient=Gradient(save, reference.embedding_lookup_backward, fake_gradient, prefer_backward),
    draw=draw_look_up,
    validate=validate,
    fake=fake,
    prefer=prefer,
    cpu_cases=CPU_CASES,
    rewrites=tuple(rewrites()),
    peers={"per_table": reference.per_table},
    dtypes=FLOATING,
    configs={"cuda": configs_forward, "cuda_backward": configs_backward},
    nondeterministic="the CUDA kernels add gradients of equal ids by atomics (float32, float64)",
)
