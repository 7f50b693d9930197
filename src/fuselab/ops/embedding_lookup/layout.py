"""The vectors that a look-up returns and the gradients of its tables, allocated around the kernels
of an implementation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.row_update import RowUpdate
from fuselab.ops.embedding_lookup.validation import rule


def empty_output(tables: Sequence[Tensor], ids: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return a new, uninitialised output, (samples, tables, D)."""
    return tables[0].new_empty((*ids.shape, tables[0].shape[1]), dtype=dtype)


def forward_of(
    run: Callable[[Sequence[Tensor], Tensor, str, Tensor], None],
) -> Callable[..., Tensor]:
    """Return the forward of an implementation whose ``run(tables, ids, rule, output)`` writes the
    vectors of one id or more."""

    @functools.wraps(run)
    def forward(
        tables: Sequence[Tensor], ids: Tensor, out_of_range: str, hash: str | None, dtype: Any
    ) -> Tensor:
        output = empty_output(tables, ids, dtype)
        if ids.numel():
            run(tables, ids, rule(out_of_range, hash), output)
        return output

    return forward


def backward_of(
    change: Callable[..., None], all_tables: bool = False
) -> Callable[..., tuple[Tensor | None, ...]]:
    """Return the backward of an implementation whose ``change`` changes rows by a ``RowUpdate``.

    ``change(how, tables, rows, states, ids, grad_output)`` skips a table that is None; with
    ``all_tables`` it gets all of them, and gradients that are not needed are dropped afterwards.
    """

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
            grad_output.new_zeros((count, width), dtype=table_dtype) if need or all_tables else None
            for need, count in zip(needs, rows, strict=False)
        ]
        how = RowUpdate("gradient", table_dtype, out_of_range, hash)
        change(how, grads, rows, (), ids, grad_output)
        return (*(grad if need else None for grad, need in zip(grads, needs, strict=False)), None)

    return backward
