"""Embedding look-up over many tables in plain PyTorch: the definition, and its gradient."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops.embedding_lookup.validation import compute_dtype, rows_of


def embedding_lookup(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str = "error",
    hash: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Look up row ``ids[b, t]`` of table t for every sample b and table t, in one launch.

    Args:
        tables: T tensors (rows_t, D) of one D and dtype (float32, float16, bfloat16 or float64).
        ids: (B, T), int64 or int32, any strides.
        out_of_range: the meaning of a negative id, or one past the last row. ``"error"``: as in
            PyTorch, an IndexRangeError on the CPU and a device assert on the GPU. ``"clamp"``: the
            first or last row. ``"ignore"``: a vector of zeros that gets no gradient.
        hash: ``"modulus"``: the id stands for row ``id mod rows_t``, as in ``hash_indices``, so
            that none is out of range. None: ids are row numbers.
        dtype: of the result (float32, float16, bfloat16 or float64). None: the tables'.

    Returns:
        (B, T, D), contiguous, in ``dtype``, each element rounded once.

    The gradient is dense: one tensor per table in the table's dtype, as for ``nn.Embedding``. It
    costs memory and time for all rows of all tables; ``updating_embedding_lookup`` costs them only
    for the rows selected. Gradients of equal ids are summed in float32 (float64 for float64
    tables). The order of these sums is not fixed for float32 and float64 tables unless
    ``torch.use_deterministic_algorithms`` asks for it.

    Raises:
        ArgumentError: there are no tables, or a table has no rows where the rule must find one.
        ShapeError, DtypeError, UnknownNameError: they name the argument and the expectation.
        IndexRangeError: an id is out of range (CPU).
    """
    vectors = []
    for place, table in enumerate(tables):
        row, inside = rows_of(ids, place, table.shape[0], out_of_range, hash)
        if table.numel() == 0 or ids.shape[0] == 0:
            # At width 0 F.embedding's gradient reads address 0 on a GPU (pytorch/pytorch#189668).
            # With no ids its second derivative raises, as it reshapes no elements to (0, -1).
            vector = table.new_zeros((ids.shape[0], table.shape[1])) + table.sum()
        else:
            vector = torch.nn.functional.embedding(row, table)
        vectors.append(vector if inside is None else torch.where(inside[:, None], vector, 0))
    return torch.stack(vectors, dim=1).to(dtype or tables[0].dtype)


def embedding_lookup_backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    ids: Tensor,
    rows: Sequence[int],
    out_of_range: str,
    hash: str | None,
    table_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Return, for each row, the sum of its ids' upstream gradients. ``needs`` has one entry per
    table and a last one for the ids."""
    wide = grad_output.to(compute_dtype(table_dtype))
    return (
        *(
            _sums(wide, ids, place, count, out_of_range, hash).to(table_dtype) if need else None
            for place, (need, count) in enumerate(zip(needs, rows, strict=False))
        ),
        None,
    )


def _sums(
    grad_output: Tensor, ids: Tensor, place: int, rows: int, out_of_range: str, hash: str | None
) -> Tensor:
    row, inside = rows_of(ids, place, rows, out_of_range, hash)
    grad = grad_output[:, place]
    sums = grad.new_zeros((rows, grad.shape[1]))
    if rows > 0:
        counted = grad if inside is None else torch.where(inside[:, None], grad, 0)
        sums = sums.index_add(0, row, counted)
    return sums


def per_table(
    tables: Sequence[Tensor],
    ids: Tensor,
    out_of_range: str = "error",
    hash: str | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Look up each table by itself and stack the vectors, as model code does."""
    columns = (
        torch.nn.functional.embedding(
            rows_of(ids, place, table.shape[0], out_of_range, hash)[0], table
        )
        for place, table in enumerate(tables)
    )
    return torch.stack(list(columns), dim=1).to(dtype or tables[0].dtype)
