"""Sizes with whole divisions, which a package takes as exact where they are in the example."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import sympy


class Floored(sympy.Function):  # type: ignore[misc]  # sympy has no types
    """A whole division that is meant to lose the remainder, such as the number of windows in a
    dimension; nothing has to divide for it."""

    is_integer = True
    is_nonnegative = True

    @classmethod
    def eval(cls, one: sympy.Expr, by: sympy.Expr) -> sympy.Expr | None:
        """Return the quotient of numbers."""
        if one.is_Integer and by.is_Integer:
            return sympy.Integer(int(one) // int(by))
        return None


def in_example(size: Any, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return a size in the example."""
    if isinstance(size, int) or size.is_Integer:
        return int(size)
    return int(hints[size] if size.is_Symbol else with_symbols(size, hints))


def with_symbols(size: Any, replaced: Mapping[sympy.Symbol, Any]) -> Any:
    """Return a size, or a condition, with those of its symbols replaced that are in ``replaced``.

    Sympy goes through all that it is to replace, and a function of many tensors has hundreds of
    symbols; it is given those of the size alone.
    """
    met = {one: replaced[one] for one in size.free_symbols if one in replaced}
    return size.subs(met) if met else size


def floored(size: sympy.Expr) -> dict[sympy.Expr, sympy.Expr]:
    """Return what to replace each whole division of a size by where it may lose a remainder."""
    return {part: Floored(*part.args) for part in sympy.preorder_traversal(size) if _divides(part)}


def exact_size(size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Return a size with one whole division at most, where all its divisions are exact in the
    example: the halves of ``chunk``, which are ``(n + 1) // 2`` and ``n - (n + 1) // 2``, are both
    ``n // 2``. The package then requires that ``n`` be even."""
    size = sympy.expand(size)
    divisions = [part for part in sympy.preorder_traversal(size) if _divides(part)]
    if not divisions:
        return size
    exact = size.replace(_divides, lambda part: _fraction(part, hints))
    numerator, denominator = sympy.together(exact).as_numer_denom()
    numerator, denominator = sympy.factor(numerator), sympy.factor(denominator)
    value, by = with_symbols(numerator, hints), with_symbols(denominator, hints)
    if value % by or value // by != with_symbols(size, hints):
        return size  # not exact in the example
    return numerator if denominator == 1 else divisions[0].func(numerator, denominator)


def exact_divisions(
    size: sympy.Expr, hints: Mapping[sympy.Symbol, int]
) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield what each whole division of a size divides, and by which number, where it is exact in
    the example."""
    for part in sympy.preorder_traversal(size):
        if _divides(part) and _fraction(part, hints) != part:
            yield _divided(part), part.args[1]


def _divides(part: Any) -> bool:
    return getattr(part.func, "__name__", "") == "FloorDiv"


def _fraction(division: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> sympy.Expr:
    """Return a whole division as a fraction, if what depends on sizes in it is divided exactly in
    the example, whatever number is added to it; else the division."""
    numerator, by = division.args
    divided = _divided(division)
    if not by.is_Integer or with_symbols(divided, hints) % by:
        exact = not by.is_Integer and with_symbols(numerator, hints) % with_symbols(by, hints) == 0
        return numerator / by if exact else division
    return divided / by + (numerator - divided) // by


def _divided(division: sympy.Expr) -> sympy.Expr:
    """Return what depends on sizes in the numerator of a whole division."""
    numerator = division.args[0]
    return numerator - numerator.as_coeff_Add()[0] if numerator.free_symbols else numerator
