"""A step of SGD on the rows that ids point to, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fuselab.ops.embedding_lookup.reference import embedding_lookup_backward
from fuselab.ops.embedding_lookup.validation import compute_dtype


def embedding_sgd_(
    tables: Sequence[Tensor],
    ids: Tensor,
    grad_output: Tensor,
    learning_rate: float,
    out_of_range: str = "error",
    hash: str | None = None,
) -> tuple[Tensor, ...]:
    """Writes ``w - learning_rate * g`` over every row w of ``tables`` that an id points to.

    g is the sum of the row's upstream gradients, so this is ``embedding_lookup``'s backward and
    ``torch.optim.SGD`` (no momentum, no weight decay) in one pass over the rows met. Sums are in
    float32 (float64 for float64). In float32 and float64 on a GPU the additions go to the row by
    atomics, in no fixed order, unless ``torch.use_deterministic_algorithms`` asks for one; 16-bit
    rows are always rounded once.

    Args:
        tables: T tensors (rows_t, D) of one D and dtype, written over.
        ids: (B, T), int64 or int32; ``out_of_range`` and ``hash`` as for ``embedding_lookup``.
        grad_output: (B, T, D), the gradient of ``embedding_lookup``'s result, in any of its dtypes.
        learning_rate: the step.

    Returns:
        ``tables``.

    Raises:
        ArgumentError, ShapeError, DtypeError, UnknownNameError, IndexRangeError: as
            ``embedding_lookup``; no table has changed then.
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
