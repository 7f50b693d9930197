"""Find tensors that are put together along a dimension which is reduced later."""

from __future__ import annotations

from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import Tensor

from fuselab.ejection.steps import FxNode, arguments_of

aten = torch.ops.aten
_REDUCING = {
    aten.sum, aten.prod, aten.amax, aten.amin, aten.mean, aten.var, aten.var_mean, aten.any,
    aten.all, aten.argmax, aten.argmin, aten.max, aten.min,
}  # fmt: skip


def is_reduced(node: FxNode, dim: int, among: Container[FxNode]) -> bool:
    """Return whether one of the nodes ``among`` reduces ``node``, or what is computed from it
    element by element, over its dimension ``dim``."""
    return any(_reduces(user, from_end) for user, from_end in _computed(node, dim, among))


def _computed(node: FxNode, dim: int, among: Container[FxNode]) -> Iterator[tuple[FxNode, int]]:
    """Yield the users of ``node`` and of what is computed from it element by element, each with the
    place of the dimension, counted from the end."""
    from_end = _rank(node) - dim
    seen: set[FxNode] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in among and user not in seen:
                seen.add(user)
                yield user, from_end
                if _is_pointwise(user):
                    stack.append(user)


def _reduces(node: FxNode, from_end: int) -> bool:
    if getattr(node.target, "overloadpacket", None) not in _REDUCING:
        return False
    arguments = arguments_of(node)
    if "other" in arguments:
        return False
    rank = _rank(node.args[0])
    dims: Any = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return rank - from_end in [each % rank for each in dims]


def _is_pointwise(node: FxNode) -> bool:
    tags = getattr(node.target, "tags", ())
    is_copy = getattr(node.target, "overloadpacket", None) in (aten._to_copy, aten.clone)
    return (torch.Tag.pointwise in tags or is_copy) and isinstance(node.meta.get("val"), Tensor)


def _rank(node: FxNode) -> int:
    return len(node.meta["val"].shape)
