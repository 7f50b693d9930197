"""A step of SGD or of row-wise Adagrad on the rows that ids select, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.reference import embedding_lookup_backward
from fuselab.ops.embedding_lookup.validation import compute_dtype, rows_of


def embedding_sgd_(
    tables: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    out_of_range: str = "error",
    hash: str | None = None,
) -> tuple[Tensor, ...]:
    """Write ``w - learning_rate * g`` over every row w of ``tables`` that an id selects.

    g is the sum of the row's upstream gradients, so this is ``embedding_lookup``'s backward and
    ``torch.optim.SGD`` (no momentum, no weight decay) in one pass over the selected rows. Sums are
    in float32 (float64 for float64). In float32 and float64 on a GPU, atomics add to the row in no
    fixed order, unless ``torch.use_deterministic_algorithms`` asks for one; 16-bit rows are always
    rounded once.

    Args:
        tables: T tensors (rows_t, D) of one D and dtype, written over.
        ids: (B, T), int64 or int32; ``out_of_range`` and ``hash`` as for ``embedding_lookup``.
        grad_output: (B, T, D), the gradient of ``embedding_lookup``'s result, in any of its dtypes.
        learning_rate: the step.

    Returns:
        ``tables``.

    Raises:
        ArgumentError, ShapeError, DtypeError, UnknownNameError, IndexRangeError: as
            ``embedding_lookup``; in that case no table has changed.
    """
    rows = [table.shape[0] for table in tables]
    needs = [True] * len(tables) + [False]
    sums_in = compute_dtype(tables[0].dtype)
    grads = embedding_lookup_backward(needs, grad_output, ids, rows, out_of_range, hash, sums_in)
    return tuple(
        (table - learning_rate * grad).to(table.dtype)
        for table, grad in zip(tables, grads, strict=False)
        if grad is not None
    )


def embedding_adagrad_(
    tables: Sequence[Tensor],
    states: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    eps: float = 1e-10,
    out_of_range: str = "error",
    hash: str | None = None,
) -> tuple[Tensor, ...]:
    """Take a step of Adagrad, with one number per row, on every row that an id selects.

    With g the sum of the row's upstream gradients over all of its ids, s its state and w the row:

        s += mean(g^2)
        w -= learning_rate * g / (sqrt(s) + eps)

    This is Duchi, Hazan and Singer (JMLR 12, 2011) with the accumulator averaged over a row. The
    gradients of equal ids are summed first, in a fixed order, so that the result is exact and does
    not vary from run to run. Rows that no id selects do not change.

    Args:
        tables: T tensors (rows_t, D) of one D and dtype, written over.
        states: T tensors (rows_t,), contiguous, float32 (float64 for float64 tables), written over.
        ids: (B, T), int64 or int32; ``out_of_range`` and ``hash`` as for ``embedding_lookup``.
        grad_output: (B, T, D), the gradient of ``embedding_lookup``'s result, in any of its dtypes.
        learning_rate, eps: as in the formula; ``eps`` above 0.

    Returns:
        ``tables``.

    Raises:
        ArgumentError, ShapeError, DtypeError, UnknownNameError, IndexRangeError: as
            ``embedding_lookup``, and for states that do not fit; in that case nothing has changed.
    """
    rows = [table.shape[0] for table in tables]
    needs = [True] * len(tables) + [False]
    sums_in = compute_dtype(tables[0].dtype)
    grads = embedding_lookup_backward(needs, grad_output, ids, rows, out_of_range, hash, sums_in)
    new_tables, new_states = [], []
    for place, (table, state) in enumerate(zip(tables, states, strict=True)):
        grad = grads[place]
        assert grad is not None
        met = _met(ids, place, rows[place], out_of_range, hash)
        total = state + (grad * grad).mean(dim=1) if table.shape[1] else state
        step = learning_rate * grad / (torch.sqrt(total) + eps)[:, None]
        new_tables.append(torch.where(met[:, None], table - step, table).to(table.dtype))
        new_states.append(torch.where(met, total, state))
    return (*new_tables, *new_states)


def _met(ids: Tensor, place: int, rows: int, out_of_range: str, hash: str | None) -> Tensor:
    """Return a mask of the rows of a table that an id selects."""
    if rows == 0:
        return ids.new_zeros(0, dtype=torch.bool)
    row, inside = rows_of(ids, place, rows, out_of_range, hash)
    ones = torch.ones_like(row) if inside is None else inside.long()
    return ids.new_zeros(rows, dtype=torch.int64).index_add(0, row, ones) > 0
