"""The spellings of DLRM's dot interaction that ``fuselab.fuse`` replaces by one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.errors import ShapeError
from fuselab.op import Inputs, Rewrite


def rewrites() -> Iterator[Rewrite]:
    """Yield the patterns: the vectors in one tensor or a list, stacked in one of three ways, then
    the dense vector and the products of pairs below the diagonal."""
    for stack in (_stacked, _viewed_as_shape, _viewed_as_sizes):
        yield Rewrite(_of_tensor(stack), _call_tensor)
        yield Rewrite(_of_list(stack), _call_list, lists=("vectors",))


Stack = Callable[[Tensor, Sequence[Tensor] | Tensor], Tensor]


def _of_tensor(stack: Stack) -> Callable[..., Tensor]:
    def pattern(dense: Tensor, embeddings: Tensor, count: int, device: Any) -> Tensor:
        return _interact(dense, stack(dense, embeddings), count, device)

    return pattern


def _of_list(stack: Stack) -> Callable[..., Tensor]:
    def pattern(dense: Tensor, vectors: Sequence[Tensor], device: Any) -> Tensor:
        return _interact(dense, stack(dense, vectors), len(vectors) + 1, device)

    return pattern


def _interact(dense: Tensor, vectors: Tensor, count: int, device: Any) -> Tensor:
    products = torch.bmm(vectors, vectors.transpose(1, 2))
    lower = torch.tril_indices(count, count, -1, device=device)
    return torch.cat([dense, products[:, lower[0], lower[1]]], dim=1)


def _stacked(dense: Tensor, embeddings: Sequence[Tensor] | Tensor) -> Tensor:
    if isinstance(embeddings, Sequence):
        return torch.stack([dense, *embeddings], dim=1)
    return torch.cat([dense.unsqueeze(1), embeddings], dim=1)


def _end_to_end(dense: Tensor, embeddings: Sequence[Tensor] | Tensor) -> Tensor:
    rest = embeddings if isinstance(embeddings, Sequence) else [embeddings.flatten(1, 2)]
    return torch.cat([dense, *rest], dim=1)


def _viewed_as_shape(dense: Tensor, embeddings: Sequence[Tensor] | Tensor) -> Tensor:
    """View the joined vectors as in DLRM's original code, with the shape as a tuple."""
    shape = dense.shape
    return _end_to_end(dense, embeddings).view((shape[0], -1, shape[1]))


def _viewed_as_sizes(dense: Tensor, embeddings: Sequence[Tensor] | Tensor) -> Tensor:
    shape = dense.shape
    return _end_to_end(dense, embeddings).view(shape[0], -1, shape[1])


def _call_tensor(dense: Tensor, embeddings: Tensor, count: int) -> Inputs:
    """Return the call for the first ``count`` vectors; there may be more."""
    if embeddings.shape[1] < count - 1:
        raise ShapeError(
            f"dot_interaction: 'embeddings' has {embeddings.shape[1]} vectors; expected "
            f"{count - 1} or more for the pairs of {count}."
        )
    if embeddings.shape[1] > count - 1:
        embeddings = embeddings[:, : count - 1]
    return Inputs((dense, embeddings))


def _call_list(dense: Tensor, vectors: Sequence[Tensor]) -> Inputs:
    return Inputs((dense, torch.stack(list(vectors), dim=1)))
