"""The operands of feature interactions: a dense vector and embeddings, per sample."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError


def autocast(autocast_dtype: torch.dtype, *args: Any) -> tuple[Any, ...]:
    """Cast as for a matrix product: every tensor but float64 to the autocast dtype."""
    return tuple(
        value.to(autocast_dtype)
        if isinstance(value, Tensor) and value.dtype != torch.float64
        else value
        for value in args
    )


def check_shapes(operator: str, dense: Tensor, embeddings: Tensor) -> None:
    """Raise ShapeError unless the shapes are (batch, width) and (batch, tables, width)."""
    if dense.dim() != 2:
        raise ShapeError(
            f"{operator}: 'dense' has shape {tuple(dense.shape)}; expected (batch, width)."
        )
    batch, width = dense.shape
    if embeddings.dim() != 3 or embeddings.shape[0] != batch or embeddings.shape[2] != width:
        raise ShapeError(
            f"{operator}: 'embeddings' has shape {tuple(embeddings.shape)}; expected ({batch}, "
            f"tables, {width}) beside a 'dense' of shape {tuple(dense.shape)}."
        )
