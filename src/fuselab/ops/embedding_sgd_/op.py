"""The contract of ``fuselab::embedding_sgd_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Cost, Draw, FusedOp, Implementation, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.embedding_lookup import configs, cpu_launch, cuda_launch, triton_launch
from fuselab.ops.embedding_lookup.cases import (
    TIMED,
    TIMED_IN_EVERY_DTYPE,
    TIMED_ON_CPU,
    case_name,
    draw_gradient,
    tables_and_ids,
)
from fuselab.ops.embedding_lookup.row_threads import Spread
from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.table_groups import scattered
from fuselab.ops.embedding_lookup.validation import check_gradient, check_ids, check_tables
from fuselab.ops.embedding_sgd_ import reference
from fuselab.runtime.tuning import Config


def validate(
    tables: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    out_of_range: str,
    hash: str | None,
) -> None:
    """Raises ArgumentError, ShapeError, DtypeError, UnknownNameError as the docstring says."""
    check_tables("embedding_sgd_", tables)
    check_ids("embedding_sgd_", tables, ids, out_of_range, hash)
    check_gradient("embedding_sgd_", tables, ids, grad_output)


def _arguments(
    tables: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    out_of_range: str,
    hash: str | None,
) -> tuple[RowUpdate, Sequence[Tensor], Sequence[int], Sequence[Tensor], Tensor, Tensor]:
    how = RowUpdate("sgd", tables[0].dtype, out_of_range, hash, learning_rate)
    return how, tables, [table.shape[0] for table in tables], (), ids, grad_output


def forward_cuda(*args: Any) -> None:
    cuda_launch.change(*_arguments(*args))


def forward_triton(*args: Any) -> None:
    triton_launch.change(*_arguments(*args))


def forward_cpp(*args: Any) -> None:
    cpu_launch.change(*_arguments(*args))


def configs_cuda(*args: Any) -> Sequence[Config]:
    how, tables, rows, _, ids, grad_output = _arguments(*args)
    spread = Spread.of_change(how, tables, grad_output)
    return configs.change(how, spread, ids, grad_output, rows)


def supports(tables: Sequence[Tensor], *_: Any) -> str | None:
    return scattered(tables)


def supports_cuda(tables: Sequence[Tensor], *_: Any) -> str | None:
    return scattered(tables) or cuda_launch.too_wide(tables)


def supports_triton(tables: Sequence[Tensor], *_: Any) -> str | None:
    return triton_launch.supports_update(tables)


def prefer(tables: Sequence[Tensor], ids: Tensor, *_: Any) -> Sequence[str]:
    """Look-up and update of 2048 and 65536 samples of Kaggle's 26 tables x 16 float32: CUDA 15.8
    and 132.8 us, Triton 77.2 and 392.7 (H200, 2026-11-22)."""
    return ("cuda", "triton")


def cost(
    tables: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    out_of_range: str,
    hash: str | None,
) -> Cost:
    """Every id and gradient read once, every row met (as if no id came twice, but at most all rows)
    read and written once; an addition per gradient element, two operations per row element."""
    width = tables[0].shape[1]
    row_bytes = width * tables[0].element_size()
    rows = sum(min(ids.shape[0], table.shape[0]) for table in tables)
    read = (
        ids.numel() * (ids.element_size() + width * grad_output.element_size()) + rows * row_bytes
    )
    return Cost(read, rows * row_bytes, (ids.numel() + 2 * rows) * width)


def _case(batch: int, sizes: Sequence[int], width: int, *tags: str, **options: Any) -> Case:
    """``gradient``: the dtype of the upstream gradient, where it is not the tables'."""
    rules = {name: value for name, value in options.items() if name != "gradient"}

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        tables, ids = tables_and_ids(batch, sizes, width, device, dtype, generator, bool(rules))
        grad = torch.randn((batch, len(sizes), width), generator=generator)
        grad = grad.to(device, options.get("gradient", dtype))
        return Inputs((tables, ids, grad, 0.1), rules)

    return Case(case_name(batch, sizes, width, options), make, frozenset(tags))


_SMALL = (3, 1, 105, 27, 5000)
CPU_CASES = (
    *(_case(*case, *cpu_sizes.ROW) for case in TIMED_ON_CPU),
    *(_case(*case, *cpu_sizes.DTYPES) for case in TIMED_IN_EVERY_DTYPE),
)
CASES = (
    *(_case(batch, sizes, 16, "bench", "sweep", *tags) for batch, sizes, tags in TIMED),
    _case(65536, KAGGLE_CARDINALITIES, 16, "bench", "huge", gradient=torch.bfloat16),
    *(_case(70, _SMALL, width, "boundary") for width in (1, 3, 4, 7, 8, 16, 17, 128, 129)),
    *(_case(batch, _SMALL, 16, "boundary") for batch in (0, 1, 31, 32, 33, 257, 1025)),
    *(_case(100, _SMALL, 16, "boundary", out_of_range=rule) for rule in ("clamp", "ignore")),
    _case(100, _SMALL, 16, "boundary", hash="modulus"),
    *(_case(100, _SMALL, 16, "boundary", gradient=dtype) for dtype in FLOATING),
    _case(100, _SMALL, 17, "boundary", gradient=torch.bfloat16),
    _case(5, (4,) * 33, 4, "boundary"),
)


def draw(draw: Draw) -> Inputs:
    tables, ids, grad_output, rules = draw_gradient(draw)
    return Inputs((tables, ids, grad_output, draw.uniform(0.0, 1.0)), rules)


OP = FusedOp(
    name="fuselab::embedding_sgd_",
    reference=reference.embedding_sgd_,
    implementations={
        "cuda": Implementation("cuda", forward_cuda, supports=supports_cuda),
        "triton": Implementation("cuda", forward_triton, supports=supports_triton),
        "cpp": Implementation("cpu", forward_cpp, supports=supports),
    },
    cost=cost,
    cases=CASES,
    draw=draw,
    validate=validate,
    prefer=prefer,
    cpu_cases=CPU_CASES,
    dtypes=FLOATING,
    configs={"cuda": configs_cuda},
    nondeterministic="the CUDA kernels add gradients of equal ids by atomics (float32, float64)",
    mutates=("tables",),
)
