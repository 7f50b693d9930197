"""The spellings of DLRM's outer interaction and its linear layer that ``fuselab.fuse`` replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Inputs, Rewrite
from fuselab.ops._shared.activations import ACTIVATIONS


def rewrites() -> Iterator[Rewrite]:
    """Yield the patterns: the outer product by broadcasting or bmm, of vectors in one tensor or a
    list, then the linear layer with or without a bias and every activation's spellings."""
    for outer in (_broadcast, _multiplied):
        for has_bias in (True, False):
            for entry in ACTIVATIONS.values():
                for activate in entry.spellings:
                    yield _of_tensor(outer, has_bias, entry.name, activate)
                    yield _of_list(outer, has_bias, entry.name, activate)


def _broadcast(row: Tensor) -> Tensor:
    return (row.unsqueeze(2) * row.unsqueeze(1)).flatten(1)


def _multiplied(row: Tensor) -> Tensor:
    return torch.bmm(row.unsqueeze(2), row.unsqueeze(1)).flatten(1)


Outer = Callable[[Tensor], Tensor]
Activate = Callable[[Tensor], Tensor]


def _of_tensor(outer: Outer, has_bias: bool, activation: str, activate: Activate) -> Rewrite:
    def pattern(dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        row = torch.cat([dense, embeddings.flatten(1, 2)], dim=1)
        return activate(F.linear(outer(row), weight, bias))

    def call(
        dense: Tensor, embeddings: Tensor, weight: Tensor, bias: Tensor | None = None
    ) -> Inputs:
        return Inputs((dense, embeddings, weight, bias, activation))

    if has_bias:
        return Rewrite(pattern, call)
    return Rewrite(lambda dense, embeddings, weight: pattern(dense, embeddings, weight, None), call)


def _of_list(outer: Outer, has_bias: bool, activation: str, activate: Activate) -> Rewrite:
    def pattern(
        dense: Tensor, vectors: Sequence[Tensor], weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        row = torch.cat([dense, *vectors], dim=1)
        return activate(F.linear(outer(row), weight, bias))

    def call(
        dense: Tensor, vectors: Sequence[Tensor], weight: Tensor, bias: Tensor | None = None
    ) -> Inputs:
        embeddings = torch.stack(list(vectors), dim=1)
        return Inputs((dense, embeddings, weight, bias, activation))

    if has_bias:
        return Rewrite(pattern, call, lists=("vectors",))
    return Rewrite(
        lambda dense, vectors, weight: pattern(dense, vectors, weight, None),
        call,
        lists=("vectors",),
    )
