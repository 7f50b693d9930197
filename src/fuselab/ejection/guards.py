"""Find loads whose elements count only where a condition holds.

The elements of a window that reaches beyond a tensor, as at a border with padding, are ``where(is
inside, element, 0)``, and the element is loaded at ``where(is inside, place, 0)``, which is a place
of the tensor in any case. A kernel that loads nothing where the condition is false needs no safe
place, and the place itself grows regularly along a row.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fuselab.ejection.loops import Apply, Constant, Expression, Load, children, chosen_in, walk


def guards_of(values: Sequence[Expression]) -> dict[Expression, Expression]:
    """Return the condition of each load in ``values`` that is computed at safe places, and that
    nothing uses where the condition is false."""
    found: dict[Expression, Expression] = {}
    for one in walk(values):
        condition = _condition(one) if isinstance(one, Load) else None
        if condition is not None:
            found[one] = condition
    for condition in set(found.values()):
        for one in _used_without(condition, values):
            if found.get(one) is condition:
                del found[one]
    return found


def chosen_outside(
    guards: Mapping[Expression, Expression], values: Sequence[Expression]
) -> dict[Expression, Constant]:
    """Return of each load that has a guard what counts in its place where the guard does not hold,
    if that is one number that every dtype has: a load can give it there."""
    found: dict[Expression, set[Constant]] = {}
    for one in walk(values):
        if isinstance(one, Apply) and one.function == "where":
            condition, element, other = one.operands
            if guards.get(element) is condition and isinstance(other, Constant):
                found.setdefault(element, set()).add(other)
    return {
        one: constant
        for one, constants in found.items()
        for constant in constants
        if len(constants) == 1 and isinstance(one, Load) and one.tensor.kind == "float"
        if constant.value in (0.0, math.inf, -math.inf)
    }


def guarded_children(
    one: Expression, guards: Mapping[Expression, Expression]
) -> tuple[Expression, ...]:
    """Return what an expression is computed from: a load that has a guard, from the guard and from
    its places before they are made safe."""
    if one not in guards:
        return children(one)
    assert isinstance(one, Load)
    return guards[one], *(unguarded(axis.value) for axis in chosen_in(one.index))


def unguarded(place: Expression) -> Expression:
    """Return the computed position of a load that has a guard, which holds where the guard does."""
    assert isinstance(place, Apply)
    return place.operands[1]


def _condition(load: Load) -> Expression | None:
    """Return the condition under which all computed positions of a load are 0."""
    places = [axis.value for axis in chosen_in(load.index)]
    if not places or not all(
        isinstance(one, Apply) and one.function == "where" and _is_zero(one.operands[2])
        for one in places
    ):
        return None
    conditions = {one.operands[0] for one in places if isinstance(one, Apply)}
    return conditions.pop() if len(conditions) == 1 else None


def _used_without(condition: Expression, values: Sequence[Expression]) -> set[Expression]:
    """Return the expressions that ``values`` use not only where ``condition`` holds."""
    found: set[Expression] = set()

    def visit(one: Expression) -> None:
        if one in found:
            return
        found.add(one)
        parts = children(one)
        if isinstance(one, Apply) and one.function == "where" and parts[0] is condition:
            parts = (parts[0], parts[2])
        for part in parts:
            visit(part)

    for value in values:
        visit(value)
    return found


def _is_zero(one: Expression) -> bool:
    return isinstance(one, Constant) and one.value == 0
