"""Write the calls of a package that are timed on a CPU: the example's sizes, and smaller ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from fuselab.ejection.equal_sizes import hint_of
from fuselab.ejection.graph_nodes import expression_of
from fuselab.ejection.package import Package
from fuselab.runtime.signature import sum_of_products

_SMALLER = (16, 256)  # the shares of the example's elements
_LEAST_NUMEL = 64
_FEW = (4096, 256)  # elements of the largest argument in calls that are drawn often


def smaller_shapes(package: Package) -> list[list[tuple[int, ...]]]:
    """Return the shapes of all arguments in smaller calls than the example."""
    found = _of_shares(package, _SMALLER)
    return [shapes for shapes in found if max(map(math.prod, shapes)) >= _LEAST_NUMEL]


def small_shapes(package: Package) -> list[list[tuple[int, ...]]]:
    """Return the shapes of all arguments in calls with few elements."""
    example = [tuple(map(hint_of, one.tensor.shape)) for one in package.captured.arguments]
    numel = max(map(math.prod, example))
    found = _of_shares(package, [max(1, numel // few) for few in _FEW])
    return [shapes for shapes in found if shapes != example]


def _of_shares(package: Package, shares: Sequence[int]) -> list[list[tuple[int, ...]]]:
    found: list[list[tuple[int, ...]]] = []
    for share in shares:
        hints = _smaller(package, share)
        shapes = [
            tuple(int(expression_of(size).subs(hints)) for size in one.tensor.shape)
            for one in package.captured.arguments
        ]
        if shapes not in found:
            found.append(shapes)
    return found


def _counted(package: Package, sizes: Mapping[sympy.Symbol, int]) -> set[sympy.Symbol]:
    """Return the sizes whose places the example's integers may count: those that are not much
    larger than the largest integer, or else the least that is larger."""
    captured = package.captured
    found: set[sympy.Symbol] = set()
    for name, (_, high) in captured.ranges.items():
        larger = {symbol: size for symbol, size in sizes.items() if size > high}
        if name == captured.seed or high < 2 or not larger:
            continue
        most = max(min(larger.values()), high * 5 // 4)
        found |= {symbol for symbol, size in larger.items() if size <= most}
    return found


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
    multiples, least, counted = package.multiples, package.least, _counted(package, sizes)

    def can_halve(symbol: sympy.Symbol) -> bool:
        name, half = package.sizes.names[symbol], sizes[symbol] // 2
        named = {package.sizes.names[one]: size for one, size in {**sizes, symbol: half}.items()}
        whole = half * 2 == sizes[symbol] and all(
            sum_of_products(text, named) % factor == 0 for text, factor in multiples.items()
        )
        return symbol not in counted and whole and half > max(1, least.get(name, 0))

    while share > 1:
        halvable = [symbol for symbol in sizes if can_halve(symbol)]
        if not halvable:
            break
        sizes[max(halvable, key=sizes.__getitem__)] //= 2
        share //= 2
    return {**package.captured.hints, **sizes}
