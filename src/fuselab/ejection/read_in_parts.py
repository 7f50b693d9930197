"""Find tensors that are reduced along a dimension and then read in slices of it.

A norm before a rotary embedding sums over a row, whose halves the rotation reads apart. A kernel's
columns are one loop: where it goes over the whole row, the halves are another kernel's, which
reads the row again. Where the sum, too, takes the row's parts, both are one kernel.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from fuselab.ejection.graph_nodes import (
    FxNode,
    arguments_of,
    expression_of,
    is_pointwise,
    packet_of,
    rank_of,
    reduced_dims,
)

aten = torch.ops.aten
_SPLITS = (aten.split, aten.split_with_sizes)


def slices_read(reduction: FxNode, dim: int, size: Any, among: Container[FxNode]) -> list[FxNode]:
    """Return the nodes that slice or split the dimension ``dim``, of ``size``, of what is computed
    from a reduction over it; none if something else reads it whole.

    A value that is put together along the dimension from parts may be read by anything. ``among``
    are the nodes that count, those of the forward.
    """
    found: dict[FxNode, None] = {}
    seen: set[FxNode] = set()
    rank = rank_of(reduction.args[0])
    stack = [(one, rank - dim, False) for one in _results(reduction)]
    while stack:
        node, from_end, is_whole = stack.pop()
        place = rank_of(node) - from_end
        for user in node.users:
            if user in seen or user not in among:
                if is_whole and user.op == "output":
                    return []
                continue
            seen.add(user)
            if is_whole and _cuts(user, place):
                found[user] = None
            elif is_pointwise(user):
                now_whole = _has_size(user, from_end, size)
                if not (now_whole and _is_joined(user, from_end)):
                    stack.append((user, from_end, now_whole))
            elif packet_of(user) in (aten.transpose, aten.permute):
                stack.append((user, rank - _moved(user, place), is_whole))
            elif place in reduced_dims(user):
                stack += [(one, from_end, False) for one in _results(user)]
            else:
                return []
    return list(found)


def _results(node: FxNode) -> list[FxNode]:
    """Return the nodes of the tensors that a reduction returns."""
    return [node] if isinstance(node.meta["val"], Tensor) else list(node.users)


def _has_size(node: FxNode, from_end: int, size: Any) -> bool:
    shape = node.meta["val"].shape
    return len(shape) >= from_end and expression_of(shape[-from_end]) == expression_of(size)


def _cuts(node: FxNode, place: int) -> bool:
    """Return whether a node slices or splits its first argument along the dimension ``place``."""
    packet = packet_of(node)
    if packet is not aten.slice and packet not in _SPLITS:
        return False
    return bool(arguments_of(node).get("dim", 0) % rank_of(node.args[0]) == place)


def _moved(node: FxNode, place: int) -> int:
    """Return where a transposition puts the dimension ``place``."""
    rank = rank_of(node)
    if packet_of(node) is aten.permute:
        return [dim % rank for dim in node.args[1]].index(place)
    first, second = (int(dim) % rank for dim in node.args[1:3])
    return {first: second, second: first}.get(place, place)


def _is_joined(node: FxNode, from_end: int) -> bool:
    """Return whether an element-wise node computes from what is put together along a dimension."""
    seen = {node}
    stack = [node]
    while stack:
        for operand in stack.pop().all_input_nodes:
            if packet_of(operand) is aten.cat:
                rank = rank_of(operand)
                if rank - arguments_of(operand).get("dim", 0) % rank == from_end:
                    return True
            elif operand not in seen and is_pointwise(operand):
                seen.add(operand)
                stack.append(operand)
    return False
