"""Hash ids by their modulus, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.errors import OperandError
from fuselab.ops._shared.indices import is_readable


def hash_indices(ids: Tensor, cardinalities: Tensor, method: str = "modulus") -> Tensor:
    """Compute ``ids[b, t] mod cardinalities[t]``: an index below the cardinality for any id.

    The modulus is Python's ``%``: -1 mod 10 is 9. Criteo's convention, which maps missing ids (-1)
    to 0, is ``hash_indices(ids + 1, cardinalities)``. Ids that are not uniform fill the slots
    unevenly, and ids that share a slot share an embedding; ``vocabulary_indices`` avoids both.

    Args:
        ids: (samples, columns), int64 or int32, any strides.
        cardinalities: (columns,), int64 or int32, on the same device; each at least 1.
        method: ``"modulus"``.

    Returns:
        (samples, columns) int64, contiguous, column t in [0, ``cardinalities[t]``).

    Raises:
        DtypeError: ``ids`` or ``cardinalities`` is neither int64 nor int32.
        ShapeError: ``ids`` does not have two dimensions, or ``cardinalities`` not one entry per
            column.
        UnknownNameError: ``method`` is not one of the known names.
        ArgumentError: a cardinality is below 1. On a GPU, where reading it would synchronise, a
            device assert stops the kernels instead, and the reference's result is undefined.
    """
    if is_readable(cardinalities) and ids.numel():
        refuse_not_positive(cardinalities)
    return torch.remainder(ids.long(), cardinalities.long()).contiguous()


def refuse_not_positive(cardinalities: Tensor) -> None:
    """Raise OperandError for the first cardinality below 1."""
    for column, cardinality in enumerate(cardinalities.tolist()):
        if cardinality < 1:
            raise OperandError(
                f"hash_indices: 'cardinalities' has {cardinality} for column {column}; expected 1 "
                "or more."
            )
