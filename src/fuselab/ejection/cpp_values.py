"""Tell the C++ emitter whether a value is a number or a vector, and whether it takes long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeGuard

from fuselab.ejection.functions import CPP_INTEGERS, CPP_SLOW
from fuselab.ejection.loops import (
    Apply,
    Constant,
    Expression,
    Load,
    Position,
    Size,
    children,
    element_kind,
    walk,
)

_ARITHMETIC = frozenset({"add", "sub", "mul", "div", "neg", "reciprocal"})


def takes_long(one: Expression) -> bool:
    """Return whether a function takes longer than to load its value."""
    if not isinstance(one, Apply) or (one.kind != "int" and one.function not in CPP_SLOW):
        return False
    return not (one.function == "div" and is_power_of_two(one.operands[1]))


def compares_integers(one: Expression) -> bool:
    """Return whether a value compares integers, which have 64 bits in C++."""
    return (
        isinstance(one, Apply)
        and one.kind == "bool"
        and any(element_kind(operand) == "int" for operand in one.operands)
    )


def changes_with_position(one: Expression) -> bool:
    """Return whether a value takes another course at other positions: a comparison of them, or a
    function of them that is made of straight lines, as an absolute value is."""
    has_course = isinstance(one, Apply) and (
        compares_integers(one) or (one.kind == "int" and one.function in CPP_INTEGERS)
    )
    return has_course and any(isinstance(part, Position) for part in walk([one]))


def only_compared(values: Sequence[Expression]) -> set[Expression]:
    """Return the integers loaded for ``values`` of which nothing is computed but whether they are
    equal to others."""
    found: set[Expression] = {
        one for one in walk(values) if isinstance(one, Load) and element_kind(one) == "int"
    }
    found -= {*values}
    for one in walk(values):
        if not (isinstance(one, Apply) and one.function in ("eq", "ne")):
            found -= {*children(one)}
    return found


def is_power_of_two(one: Expression) -> TypeGuard[Constant]:
    """Return whether a value is a power of two by whose reciprocal one may multiply instead."""
    if not isinstance(one, Constant) or isinstance(one.value, bool) or not one.value:
        return False
    return (
        math.isfinite(one.value)
        and abs(math.frexp(one.value)[0]) == 0.5
        and (2.0**-100 < abs(one.value) < 2.0**100)
    )


def is_scalar(one: Expression) -> bool:
    """Return whether the text of a value is a number and not a vector."""
    if isinstance(one, Apply):
        return one.function in _ARITHMETIC and all(map(is_scalar, one.operands))
    return isinstance(one, (Constant, Size))
