"""Find tensors that are put together along a dimension which is reduced later."""

from __future__ import annotations

from collections.abc import Container, Iterator

from fuselab.ejection.graph_nodes import FxNode, is_pointwise, rank_of, reduced_dims


def is_reduced(node: FxNode, dim: int, among: Container[FxNode]) -> bool:
    """Return whether one of the nodes ``among`` reduces ``node``, or what is computed from it
    element by element, over its dimension ``dim``."""
    return any(_reduces(user, from_end) for user, from_end in _computed(node, dim, among))


def _computed(node: FxNode, dim: int, among: Container[FxNode]) -> Iterator[tuple[FxNode, int]]:
    """Yield the users of ``node`` and of what is computed from it element by element, each with the
    place of the dimension, counted from the end."""
    from_end = rank_of(node) - dim
    seen: set[FxNode] = set()
    stack = [node]
    while stack:
        for user in stack.pop().users:
            if user in among and user not in seen:
                seen.add(user)
                yield user, from_end
                if is_pointwise(user):
                    stack.append(user)


def _reduces(node: FxNode, from_end: int) -> bool:
    dims = reduced_dims(node)
    return bool(dims) and rank_of(node.args[0]) - from_end in dims
