"""Conditions of which a part is known: a mask made of ones, whose triangle is taken, say."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from fuselab.ejection.loops import Apply, Constant, Expression, Kind, element_kind

# What a function of two conditions is where one of them is known: by that one, the other.
_WITH_A_KNOWN_ONE: Mapping[str, Callable[[bool, Expression], Expression]] = {
    "and": lambda known, other: other if known else Constant(False),
    "or": lambda known, other: Constant(True) if known else other,
    "xor": lambda known, other: negated(other) if known else other,
    "eq": lambda known, other: other if known else negated(other),
    "ne": lambda known, other: negated(other) if known else other,
}


def condition(function: str, operands: tuple[Expression, ...]) -> Expression:
    """Return a function of ``operands`` that is true or false, without the conditions among them
    that are known."""
    if all(element_kind(operand) == "bool" for operand in operands):
        if function == "not":
            return negated(operands[0])
        rule = _WITH_A_KNOWN_ONE.get(function)
        if rule is not None and len(operands) == 2:
            for one, other in (operands, operands[::-1]):
                if isinstance(one, Constant):
                    return rule(bool(one.value), other)
    return Apply(function, operands, "bool")


def in_kind(value: Expression, kind: Kind) -> Expression:
    """Return a value; one that is known, as a condition or a whole number where it is one."""
    if isinstance(value, Constant) and kind != "float":
        return Constant(bool(value.value) if kind == "bool" else int(value.value))
    return value


def negated(one: Expression) -> Expression:
    """Return whether a condition is false."""
    return Constant(not one.value) if isinstance(one, Constant) else Apply("not", (one,), "bool")
