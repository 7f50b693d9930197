"""Find the sizes of a captured graph that PyTorch keeps apart though they are equal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from fuselab.ejection.exact_sizes import in_example, with_symbols

aten = torch.ops.aten
_CHOICES = (aten.gather, aten.scatter, aten.scatter_add)


def equate_sizes(graph: fx.Graph) -> None:
    """Make the sizes of an index one with those of the tensor that it chooses from, where they are
    equal in the example: PyTorch would allow the index to be smaller."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) not in _CHOICES:
            continue
        tensor, dim, index = _choice(node)
        for place, (one, other) in enumerate(zip(tensor.shape, index.shape, strict=True)):
            if place != dim % tensor.dim() and hint_of(one) == hint_of(other):
                bool(one == other)  # from here on the tracer's symbols for them are the same


def equal_sizes(graph: fx.Graph) -> dict[sympy.Symbol, sympy.Expr]:
    """Return the sizes that pointwise operators and choices of elements have found equal to an
    expression of others: PyTorch goes on with both.

    Such a size is the half of another. One that is repeated is 1, as the sixth of a size that is 6:
    that size is the example's then. Where products are equal, as where two tensors are flattened
    before they meet, the factors are: PyTorch would allow others with the same product.
    """
    found: dict[sympy.Symbol, sympy.Expr] = {}
    for one, other, hint in _equal_pairs(graph):
        one, other = with_symbols(one, found), with_symbols(other, found)
        if other == 1:
            equal = {symbol: sympy.Integer(hint[symbol]) for symbol in one.free_symbols}
        elif one.is_Symbol and not one.free_symbols & other.free_symbols:
            equal = {one: other}
        else:
            equal = _equal_factors(one, other, hint)
        found = {symbol: with_symbols(size, equal) for symbol, size in found.items()} | equal
    return found


def _equal_pairs(
    graph: fx.Graph,
) -> Iterator[tuple[sympy.Expr, sympy.Expr, Mapping[sympy.Symbol, int]]]:
    """Yield expressions of sizes that are equal in the example, and have to be in any call, with
    the sizes of the example in the order of the arguments."""
    hints: dict[sympy.Symbol, int] = {}
    for node in graph.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, Tensor):
            shape: tuple[Any, ...] = tuple(value.shape)
            sizes = [size.node for size in shape if isinstance(size, torch.SymInt)]
            hints.update({size.expr: size.hint for size in sizes if size.expr.is_Symbol})
        for size, whole in _sizes_that_meet(node):
            if isinstance(size, torch.SymInt) and isinstance(whole, torch.SymInt):
                one, other = size.node.expr, whole.node.expr
                is_new = one != other and not (one.is_Symbol and other.is_Symbol)
                if is_new and size.node.hint == whole.node.hint:
                    yield one, other, hints
            if _is_repeated(size, whole) and size.node.expr.free_symbols <= hints.keys():
                yield size.node.expr, sympy.Integer(1), hints


def _is_repeated(size: Any, whole: Any) -> bool:
    """Return whether a size that is not a number is 1 in the example where its dimension becomes a
    longer one. A size that depends on values is none in the example."""
    if not isinstance(size, torch.SymInt) or size.node.hint != 1:
        return False
    return bool((whole.node.hint if isinstance(whole, torch.SymInt) else whole) != 1)


def _sizes_that_meet(node: fx.Node) -> Iterator[tuple[Any, Any]]:
    """Yield each size of an operand with that of the dimension of the result that it goes to."""
    if torch.Tag.pointwise in getattr(node.target, "tags", ()):
        results = node.meta["val"]  # several of torch.frexp, of one shape
        result = results if isinstance(results, Tensor) else results[0]
        for source in node.all_input_nodes:
            value = source.meta.get("val")
            if isinstance(value, Tensor):
                yield from zip(reversed(value.shape), reversed(result.shape), strict=False)
    elif getattr(node.target, "overloadpacket", None) in _CHOICES:
        tensor, dim, index = _choice(node)
        for place, pair in enumerate(zip(index.shape, tensor.shape, strict=True)):
            if place != dim % max(tensor.dim(), 1):
                yield pair


def _equal_factors(
    one: sympy.Expr, other: sympy.Expr, hints: Mapping[sympy.Symbol, int]
) -> dict[sympy.Symbol, sympy.Expr]:
    """Return the factors of a product that are those of another, by their sizes in the example, and
    by the order of the arguments' dimensions where several have one size."""
    order = list(hints)
    left, right = (set(sympy.Mul.make_args(sympy.factor(size))) for size in (one, other))
    mine, theirs = left - right, right - left
    if len(mine) != len(theirs) or any(len(part.free_symbols) != 1 for part in mine | theirs):
        return {}

    def by_size(part: sympy.Expr) -> tuple[int, int]:
        return in_example(part, hints), order.index(*part.free_symbols)

    found: dict[sympy.Symbol, sympy.Expr] = {}
    for part, like in zip(sorted(mine, key=by_size), sorted(theirs, key=by_size), strict=True):
        (symbol,), (equal,) = part.free_symbols, like.free_symbols
        if part.subs(symbol, equal) != like or hints[symbol] != hints[equal]:
            return {}
        found[symbol] = equal
    return found


def _choice(node: Any) -> tuple[Tensor, int, Tensor]:
    """Return the tensor, the dimension and the index of a choice of elements."""
    return node.args[0].meta["val"], node.args[1], node.args[2].meta["val"]


def hint_of(size: Any) -> int:
    """Return a size in the example."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)
