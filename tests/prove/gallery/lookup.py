"""An honest operator of sequences and integers: rows of several tables by id, side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import DtypeError
from fuselab.op import Case, Cost, Draw, FusedOp, Gradient, Inputs
from gallery import honest


def reference(tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    """(batch, all columns): row ``ids[b, t]`` of table t; every table has the rows of the first."""
    rows = [table[ids[:, place]] for place, table in enumerate(tables)]
    return torch.cat(rows, dim=1)


def validate(tables: Sequence[Tensor], ids: Tensor) -> None:
    if any(table.dtype != tables[0].dtype for table in tables):
        raise DtypeError("lookup: the tables differ in dtype; cast them to one.")


def forward(tables: Sequence[Tensor], ids: Tensor) -> Tensor:
    columns = sum(table.shape[1] for table in tables)
    output = tables[0].new_empty(ids.shape[0], columns)
    start = 0
    for place, table in enumerate(tables):
        output[:, start : start + table.shape[1]] = table[ids[:, place]]
        start += table.shape[1]
    return output


def save(output: Tensor, tables: Sequence[Tensor], ids: Tensor) -> tuple[Any, ...]:
    return tables, ids


def backward(
    needs: Sequence[bool], grad_output: Tensor, tables: Sequence[Tensor], ids: Tensor
) -> tuple[Tensor | None, ...]:
    grads: list[Tensor | None] = []
    start = 0
    for place, table in enumerate(tables):
        piece = grad_output[:, start : start + table.shape[1]]
        start += table.shape[1]
        if not needs[place]:
            grads.append(None)
            continue
        sums = torch.zeros(table.shape, dtype=honest.wide(table).dtype, device=table.device)
        # In a fixed order, as a table's own gradient: on CUDA index_add adds by atomics.
        sums = sums.index_put((ids[:, place],), honest.wide(piece), accumulate=True)
        grads.append(sums.to(table.dtype))
    return (*grads, None)


def cost(tables: Sequence[Tensor], ids: Tensor) -> Cost:
    columns = sum(table.shape[1] for table in tables)
    written = ids.shape[0] * columns * tables[0].element_size()
    read = min(written, sum(table.nbytes for table in tables))  # every row of a table once
    return Cost(read + ids.numel() * 8, written, 0)


def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
    tables = [torch.randn(7, width, generator=generator).to(device, dtype) for width in (8, 8, 16)]
    ids = torch.randint(7, (16, 3), generator=generator).to(device)
    return Inputs((tables, ids))


def draw(draw: Draw) -> Inputs:
    rows = draw.choice([1, 2, 5])
    tables = [draw.tensor(rows, draw.choice([1, 3, 8])) for _ in range(draw.choice([1, 2, 3]))]
    return Inputs((tables, draw.integers(draw.size(), len(tables), low=0, high=rows)))


def make_op(
    name: str,
    device: str = "cpu",
    forward: Callable[..., Any] = forward,
    backward: Callable[..., Any] = backward,
    save: Callable[..., tuple[Any, ...]] = save,
) -> FusedOp:
    """The honest operator, or one with a part of it replaced, under ``gallery::name``."""
    return honest.make_op(
        name,
        device,
        forward,
        backward,
        Gradient(save, globals()["backward"]),
        reference=reference,
        cost=cost,
        cases=(Case("16 of 7", make, frozenset({"boundary"})),),
        draw=draw,
        validate=validate,
        dtypes=(torch.float32, torch.bfloat16),
    )
