"""Find sums over a row in which a single column counts.

``gather`` along the rows, and with it the loss of cross entropy, arrives as a sum of ``where(column
== index, value, 0)``. A kernel that can compute the value of one column needs no sweep for it
(``pick_of``). Where that value is the same in every column, as in the gradient of cross entropy,
the sum is no reduction at all (``value_if_inside``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy

from fuselab.ejection.loops import (
    Along,
    Apply,
    Axis,
    Constant,
    Expression,
    Kind,
    Load,
    Node,
    Pointwise,
    Position,
    Reduced,
    Scanned,
    Size,
    children,
    walk,
)
from fuselab.ejection.parts import Parts, is_zero


@dataclass(frozen=True)
class Pick:
    """The value at the column ``index``, an integer that belongs to the row."""

    index: Expression
    value: Expression


def pick_of(
    reduced: Reduced,
    column_axes: tuple[Axis, ...],
    axes_of: Callable[[Expression], frozenset[Axis]],
) -> Pick | None:
    """Return the single value that a sum over all columns consists of, or None if it has more."""
    if (reduced.function, reduced.kind) != ("sum", "float"):
        return None
    columns = frozenset(column_axes)

    def visit(one: Expression) -> Pick | None:
        if not isinstance(one, Apply):
            return None
        if one.function == "where":
            condition, value, otherwise = one.operands
            index = index_of(condition)
            is_zero = isinstance(otherwise, Constant) and otherwise.value == 0
            return Pick(index, value) if index is not None and is_zero else None
        if one.function == "neg":
            found = visit(one.operands[0])
            return found and Pick(found.index, Apply("neg", (found.value,), one.kind))
        if one.function == "mul":
            first, second = one.operands
            for factor, other in ((first, second), (second, first)):
                found = visit(factor)
                if found is not None and not axes_of(other) & columns:
                    return Pick(found.index, Apply("mul", (found.value, other), one.kind))
        return None

    def index_of(condition: Expression) -> Expression | None:
        if not isinstance(condition, Apply) or condition.function != "eq":
            return None
        first, second = condition.operands
        for position, index in ((first, second), (second, first)):
            is_column = isinstance(position, Position) and position.axes == column_axes
            if is_column and _is_integer(index) and not axes_of(index) & columns:
                return index
        return None

    # A running reduction has no value at one column without those before it.
    if any(isinstance(one, Scanned) for one in walk([reduced.operand])):
        return None
    return visit(reduced.operand)


def value_if_inside(parts: Parts, source: Node, dim: int, has_factors: bool) -> Node | None:
    """Return the sum along ``dim`` of ``where(position == index, value, 0)``, with size 1 there,
    where neither index nor value varies along it: the value, or 0 if the index is outside. Return
    None for another sum.

    With ``has_factors`` a factor that does not vary may multiply it. An infinite one then gives no
    NaN for the zeros, as in PyTorch's gradient of the loss of cross entropy.
    """
    if not isinstance(source, Pointwise) or source.kind != "float":
        return None
    sizes = (*source.sizes[:dim], sympy.Integer(1), *source.sizes[dim + 1 :])

    def operand_dim(one: Node) -> int:
        return dim - len(source.sizes) + len(one.sizes)

    def still(one: Node | Constant | Size) -> Node | Constant | Size:
        cut: Node | Constant | Size = parts.cut_operand(
            one, len(source.sizes) - dim, sympy.S.Zero, sympy.S.One, 1
        )
        return cut

    def varies(one: Node | Constant | Size) -> bool:
        return isinstance(one, Node) and parts.varies(one, operand_dim(one))

    def step(like: Node, function: str, *operands: Node | Constant | Size) -> Node:
        kind: Kind = "float" if function in ("where", "mul", "neg") else "bool"
        return parts.pointwise(
            Pointwise(like.name, sizes, kind, like.line, False, function, operands)
        )

    function, operands = source.function, source.operands
    if function == "neg" and isinstance(operands[0], Node):
        found = value_if_inside(parts, operands[0], operand_dim(operands[0]), has_factors)
        return found and step(source, "neg", found)
    if function == "mul" and has_factors:
        for factor, other in (operands, operands[::-1]):
            if not isinstance(factor, Node) or varies(other) or not varies(factor):
                continue
            found = value_if_inside(parts, factor, operand_dim(factor), has_factors)
            if found is not None:
                return step(source, "mul", found, still(other))
    if function != "where" or not is_zero(operands[2]) or varies(operands[1]):
        return None
    condition = operands[0]
    if not isinstance(condition, Pointwise) or condition.function != "eq":
        return None
    for place, index in (condition.operands, condition.operands[::-1]):
        while isinstance(place, Pointwise) and place.function == "same":
            place = place.operands[0]
        is_place = isinstance(place, Along) and place.dim == operand_dim(place)
        if not is_place or not isinstance(index, Node) or index.kind != "int" or varies(index):
            continue
        at = still(index)
        is_inside = step(
            source,
            "and",
            step(source, "ge", at, Constant(0)),
            step(source, "lt", at, Size(source.sizes[dim])),
        )
        return step(source, "where", is_inside, still(operands[1]), Constant(0.0))
    return None


def _is_integer(one: Expression) -> bool:
    """Return whether a value is an integer that is no number known beforehand."""
    if isinstance(one, Load):
        return one.tensor.kind == "int"
    return isinstance(one, (Apply, Reduced)) and one.kind == "int" and not is_number(one)


def is_number(one: Expression) -> bool:
    """Return whether a value is the same everywhere: made of constants and sizes."""
    seen: set[Expression] = set()
    stack = [one]
    while stack:  # ends at the first part that is none, which most values have
        part = stack.pop()
        if not isinstance(part, (Constant, Size, Apply)):
            return False
        if part not in seen:
            seen.add(part)
            stack += children(part)
    return True
