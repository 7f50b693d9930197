"""Write the calls of a package that are timed on a CPU: the example's sizes, and smaller ones."""

from __future__ import annotations

import math
from collections.abc import Mapping

import sympy

from fuselab.ejection.package import Package
from fuselab.ejection.steps import expression_of
from fuselab.runtime.signature import sum_of_products

_SMALLER = (16, 256)  # the shares of the example's elements
_LEAST_NUMEL = 64


def smaller_shapes(package: Package) -> list[list[tuple[int, ...]]]:
    """Return the shapes of all arguments in smaller calls than the example."""
    arguments = package.captured.arguments
    found: list[list[tuple[int, ...]]] = []
    for share in _SMALLER:
        hints = _smaller(package, share)
        shapes = [
            tuple(int(expression_of(size).subs(hints)) for size in one.tensor.shape)
            for one in arguments
        ]
        if max(map(math.prod, shapes)) >= _LEAST_NUMEL and shapes not in found:
            found.append(shapes)
    return found


def _bounds(package: Package) -> list[int]:
    """Return how many elements a dimension has at least that the example's integers count."""
    captured = package.captured
    return [
        high + 1
        for name, (_, high) in captured.ranges.items()
        if name != captured.seed and high > 1
    ]


def factors(multiples: Mapping[str, int]) -> dict[str, int]:
    """Return for some sizes, by name, a number such that ``multiples`` hold where it divides them:
    of each product of sizes the first is taken."""
    found: dict[str, int] = {}
    for text, factor in multiples.items():
        for product in text.split(" + "):
            name = next(word for word in product.split(" * ") if word.isidentifier())
            found[name] = math.lcm(found.get(name, 1), factor)
    return found


def _smaller(package: Package, share: int) -> Mapping[sympy.Symbol, int]:
    """Return sizes whose product is a share of the example's: the largest are halved first, as long
    as the kernels take them."""
    sizes = {one: int(package.captured.hints[one]) for one in package.sizes.names}
    multiples, least, bounds = package.multiples, package.least, _bounds(package)

    def can_halve(symbol: sympy.Symbol) -> bool:
        name, half = package.sizes.names[symbol], sizes[symbol] // 2
        named = {package.sizes.names[one]: size for one, size in {**sizes, symbol: half}.items()}
        # Of a dimension that integers may count the places of, these stay.
        keeps = all(half >= bound for bound in bounds if sizes[symbol] >= bound)
        whole = (
            keeps
            and half * 2 == sizes[symbol]
            and all(
                sum_of_products(text, named) % factor == 0 for text, factor in multiples.items()
            )
        )
        return whole and half > max(1, least.get(name, 0))

    while share > 1:
        halvable = [symbol for symbol in sizes if can_halve(symbol)]
        if not halvable:
            break
        sizes[max(halvable, key=sizes.__getitem__)] //= 2
        share //= 2
    return {**package.captured.hints, **sizes}
