"""Read the nodes of a captured graph: their operators, arguments and tensors."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor

aten = torch.ops.aten
_COPIES = (aten._to_copy, aten.clone)
_REDUCING = {
    aten.sum, aten.prod, aten.amax, aten.amin, aten.mean, aten.var, aten.var_mean, aten.any,
    aten.all, aten.argmax, aten.argmin, aten.max, aten.min,
}  # fmt: skip
FxNode = Any  # torch.fx.Node, whose arguments are typed as a union of twenty types


def expression_of(size: Any) -> sympy.Expr:
    """Return a size, an int or a SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def packet_of(node: FxNode) -> Any:
    """Return the operator that a node calls, without its overload; None where it calls none."""
    return getattr(node.target, "overloadpacket", None)


def arguments_of(node: FxNode) -> dict[str, Any]:
    """Return a node's arguments by their names in the operator's schema."""
    schema = node.target._schema
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def rank_of(node: FxNode) -> int:
    """Return the number of dimensions of a node's tensor."""
    return len(node.meta["val"].shape)


def is_pointwise(node: FxNode) -> bool:
    """Return whether a node computes a tensor element by element."""
    tags = getattr(node.target, "tags", ())
    is_one = torch.Tag.pointwise in tags or packet_of(node) in _COPIES
    return is_one and isinstance(node.meta.get("val"), Tensor)


def reduced_dims(node: FxNode) -> list[int]:
    """Return the dimensions over which a node reduces its first argument; none where it does not
    reduce."""
    if packet_of(node) not in _REDUCING:
        return []
    arguments = arguments_of(node)
    if "other" in arguments:  # the larger of two tensors
        return []
    rank = rank_of(node.args[0])
    dims: Any = arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(rank)
    return [dim % rank for dim in dims]
