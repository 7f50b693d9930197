"""The cases and draws of the updates of embedding tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.op import Case, Draw, Inputs
from fuselab.ops._shared import cpu_sizes
from fuselab.ops._shared.criteo import KAGGLE_CARDINALITIES
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.embedding_lookup.cases import (
    SMALL,
    TIMED,
    TIMED_IN_EVERY_DTYPE,
    TIMED_ON_CPU,
    case_name,
    draw_gradient,
    space_gradient,
    tables_and_ids,
)
from fuselab.ops.embedding_lookup.validation import compute_dtype


def _sgd_case(batch: int, sizes: Sequence[int], width: int, *tags: str, **options: Any) -> Case:
    """Return a case of SGD. ``gradient`` is the upstream gradient's dtype if it is not the
    tables'."""
    rules = {name: value for name, value in options.items() if name != "gradient"}

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        tables, ids = tables_and_ids(batch, sizes, width, device, dtype, generator, bool(rules))
        grad = torch.randn((batch, len(sizes), width), generator=generator)
        grad = grad.to(device, options.get("gradient", dtype))
        return Inputs((tables, ids, grad, 0.1), rules)

    return Case(case_name(batch, sizes, width, options), make, frozenset(tags))


def _states(
    sizes: Sequence[int], device: torch.device, dtype: torch.dtype, generator: torch.Generator
) -> list[Tensor]:
    """Return row-wise Adagrad's states of tables of ``dtype``, uniform in [0, 1)."""
    to = compute_dtype(dtype)
    return [torch.rand(size, generator=generator).to(device, to) for size in sizes]


def _adagrad_case(batch: int, sizes: Sequence[int], *rest: Any, **options: Any) -> Case:
    sgd = _sgd_case(batch, sizes, *rest, **options)

    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        made = sgd.make(device, dtype, generator)
        tables, *others = made.args
        return Inputs((tables, _states(sizes, device, dtype, generator), *others), made.kwargs)

    return Case(sgd.name, make, sgd.tags)


def _cases(case: Callable[..., Case]) -> tuple[Case, ...]:
    return (
        *(case(batch, sizes, 16, "bench", "sweep", *tags) for batch, sizes, tags in TIMED),
        case(65536, KAGGLE_CARDINALITIES, 16, "bench", "huge", gradient=torch.bfloat16),
        *(case(70, SMALL, width, "boundary") for width in (1, 3, 4, 7, 8, 16, 17, 128, 129)),
        *(case(batch, SMALL, 16, "boundary") for batch in (0, 1, 31, 32, 33, 257, 1025)),
        *(case(100, SMALL, 16, "boundary", out_of_range=rule) for rule in ("clamp", "ignore")),
        case(100, SMALL, 16, "boundary", hash="modulus"),
        *(case(100, SMALL, 16, "boundary", gradient=dtype) for dtype in FLOATING),
        case(100, SMALL, 17, "boundary", gradient=torch.bfloat16),
        case(5, (4,) * 33, 4, "boundary"),
    )


def _cpu_cases(case: Callable[..., Case]) -> tuple[Case, ...]:
    return (
        *(case(*timed, *cpu_sizes.ROW) for timed in TIMED_ON_CPU),
        *(case(*timed, *cpu_sizes.DTYPES) for timed in TIMED_IN_EVERY_DTYPE),
    )


def draw_sgd(draw: Draw) -> Inputs:
    """Draw tables, ids, an upstream gradient, and a learning rate in [0, 1]."""
    tables, ids, grad_output, rules = draw_gradient(draw)
    return Inputs((tables, ids, grad_output, draw.uniform(0.0, 1.0)), rules)


def draw_adagrad(draw: Draw) -> Inputs:
    """Draw the same arguments and states."""
    tables, ids, grad_output, rules = draw_gradient(draw)
    generator = torch.Generator().manual_seed(len(tables))
    sizes = [table.shape[0] for table in tables]
    states = _states(sizes, draw.device, tables[0].dtype, generator)
    return Inputs((tables, states, ids, grad_output, draw.uniform(0.0, 1.0)), rules)


def space_sgd(draw: Draw) -> Inputs:
    """Draw a step of SGD as recommendation models make it."""
    tables, ids, grad_output, rules = space_gradient(draw)
    return Inputs((tables, ids, grad_output, 0.1), rules)


def space_adagrad(draw: Draw) -> Inputs:
    """Draw the same arguments and states."""
    tables, ids, grad_output, rules = space_gradient(draw)
    sizes = [table.shape[0] for table in tables]
    states = _states(sizes, draw.device, tables[0].dtype, torch.Generator().manual_seed(0))
    return Inputs((tables, states, ids, grad_output, 0.1), rules)


CASES_SGD, CPU_CASES_SGD = _cases(_sgd_case), _cpu_cases(_sgd_case)
CASES_ADAGRAD, CPU_CASES_ADAGRAD = _cases(_adagrad_case), _cpu_cases(_adagrad_case)
