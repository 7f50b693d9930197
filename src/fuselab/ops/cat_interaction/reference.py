"""DLRM's concatenation interaction in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def reference(dense: Tensor, embeddings: Tensor) -> Tensor:
    """Concatenate by ``torch.cat([dense, embeddings.flatten(1)], dim=1)``: a copy without fusion.

    Args:
        dense: ``(B, D)``, float32, float16, bfloat16 or float64, any strides.
        embeddings: ``(B, T, D)`` in the same dtype, any strides.

    Returns:
        ``(B, (T + 1) D)``, contiguous. The values are the inputs', bit for bit.

    Gradients are views of the upstream gradient, as with ``torch.cat``; in a compiled graph they
    are copies. The arguments are those of ``dot_interaction``, without the padding.

    Raises:
        ShapeError, DtypeError, UnknownNameError (implementation), DeviceError, UnsupportedError (an
        implementation asked for by name that cannot run here).
    """
    return torch.cat([dense, embeddings.flatten(1)], dim=1)


def gradient(
    needs: Sequence[bool], grad_output: Tensor, tables: int, width: int
) -> tuple[Tensor | None, ...]:
    """Return the upstream gradient's columns of dense and of embeddings."""
    dense, embeddings = grad_output.split((width, tables * width), dim=1)
    return (
        dense if needs[0] else None,
        embeddings.unflatten(1, (tables, width)) if needs[1] else None,
    )
