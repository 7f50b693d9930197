"""Embedding look-up over many tables in plain PyTorch: what is right, and its gradient."""

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
    """Row ``ids[b, t]`` of table t for every sample b and table t: T embeddings in one launch.

    Args:
        tables: T tensors (rows_t, D) of one D and dtype (float32, float16, bfloat16 or float64).
        ids: (B, T), int64 or int32, any strides.
        out_of_range: what a negative id, or one past the last row, means. ``"error"``: as in
            PyTorch, an IndexRangeError on the CPU and a device assert on the GPU. ``"clamp"``: the
            first or last row. ``"ignore"``: a vector of zeros, no gradient.
        hash: ``"modulus"``: id b of table t is row ``id mod rows_t``, as ``hash_indices`` has it,
            and none is out of range. None: ids are rows.
        dtype: of the result (float32, float16, bfloat16 or float64). None: the tables'.

    Returns:
        (B, T, D), contiguous, in ``dtype``, each element rounded once.

    The gradient is dense, a tensor per table in its dtype, as that of ``nn.Embedding``; it takes
    memory and time for all rows of all tables, and ``updating_embedding_lookup`` for the rows met.
    Sums over equal ids are in float32 (float64 for float64 tables). Their order is not fixed for
    float32 and float64 tables unless ``torch.use_deterministic_algorithms`` asks for it.

    Raises:
        ArgumentError: no tables, or a table without rows where the rule must find one.
        ShapeError, DtypeError, UnknownNameError: names the argument and what was expected.
        IndexRangeError: an id is out of range (CPU).
    """
    vectors = []
    for place, table in enumerate(tables):
        row, inside = rows_of(ids, place, table.shape[0], out_of_range, hash)
        if table.numel() == 0 or ids.shape[0] == 0:
            # On a GPU F.embedding's gradient at width 0 reads address 0: pytorch/pytorch#189668.
            # Its second derivative without ids raises: it reshapes no elements to (0, -1).
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
    """Each row's sum of the upstream gradients of its ids; ``needs`` ends with that of the ids."""
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
    """As model code has it: one look-up per table, then a stack."""
    columns = (
        torch.nn.functional.embedding(
            rows_of(ids, place, table.shape[0], out_of_range, hash)[0], table
        )
        for place, table in enumerate(tables)
    )
    return torch.stack(list(columns), dim=1).to(dtype or tables[0].dtype)
