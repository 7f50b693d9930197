"""Sizes and tensors that every implementation of the dot interaction uses alike."""

from __future__ import annotations

from torch import Tensor


def pair_count(vectors: int) -> int:
    """Pairs of ``vectors`` vectors."""
    return vectors * (vectors - 1) // 2


def empty_output(dense: Tensor, embeddings: Tensor, padding: int) -> Tensor:
    batch, tables, width = embeddings.shape
    return dense.new_empty(batch, width + pair_count(tables + 1) + padding)
