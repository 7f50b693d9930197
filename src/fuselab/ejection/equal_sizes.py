"""Find the sizes of a captured graph that PyTorch keeps apart though they are equal."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch import Tensor, fx

aten = torch.ops.aten


def equate_sizes(graph: fx.Graph) -> None:
    """Make the sizes of an index one with those of the tensor that it chooses from, where they are
    equal in the example: PyTorch would allow the index to be smaller."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in (
            aten.gather,
            aten.scatter,
            aten.scatter_add,
        ):
            continue
        tensor, dim, index = node.args[0].meta["val"], node.args[1], node.args[2].meta["val"]
        for place, (one, other) in enumerate(zip(tensor.shape, index.shape, strict=True)):
            if place != dim % tensor.dim() and _hint(one) == _hint(other):
                bool(one == other)  # from here on the tracer's symbols for them are the same


def equal_sizes(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Return the sizes that pointwise operators have found equal to an expression of others, such
    as the half of another: PyTorch goes on with both."""
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for node in graph.nodes:
        if torch.Tag.pointwise not in getattr(node.target, "tags", ()):
            continue
        shape = node.meta["val"].shape
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if not isinstance(value, Tensor):
                continue
            for size, whole in zip(reversed(value.shape), reversed(shape), strict=False):
                if not isinstance(size, torch.SymInt) or not isinstance(whole, torch.SymInt):
                    continue
                one, other = size.node.expr, whole.node.expr
                is_equal = size.node.hint == whole.node.hint and one not in other.free_symbols
                if is_equal and one.is_Symbol and not other.is_Symbol:
                    found.setdefault(one, other)
    return {one: other for one, other in found.items() if not other.free_symbols & found.keys()}


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
