"""Find sums over a row in which a single column counts.

``gather`` along the rows, and with it the loss of cross entropy, arrives as a sum of ``where(column
== index, value, 0)``. A kernel that can compute the value of one column needs no sweep for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fuselab.ejection.loops import (
    Apply,
    Axis,
    Constant,
    Expression,
    Load,
    Position,
    Reduced,
    Scanned,
    Size,
    children,
    walk,
)


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
