"""Take a reduction over dimensions that are apart in two steps.

The gradient of a scale for each channel is a sum over the batch and over all places of a map. In
one step a kernel would have one row for each channel, in pieces all over memory. In two steps the
first has a row for each channel of each map, which lies in memory as a whole and which the kernel
that computes the input's gradient has, too; the second adds up the few values that are left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

import sympy

from fuselab.ejection.loops import Pieces, Reduction

LEAST_AREA = 32  # elements of a row of the first step; the second step reads one value for each


def in_two_steps(
    whole: Reduction, hint: Callable[[sympy.Expr], int], name: str | None = None
) -> Reduction:
    """Return the reduction as one of what a reduction over the innermost dimensions gives, if it is
    over these and over others apart from them; else as it is.

    ``hint`` returns an example of a size; ``name`` is what the first step's name begins with.
    """
    source = whole.source
    inner: list[int] = []
    while (last := len(source.sizes) - 1 - len(inner)) in whole.dims:
        inner.insert(0, last)
    area = sympy.prod([source.sizes[dim] for dim in inner])
    is_short = not inner or len(inner) == len(whole.dims) or hint(area) < LEAST_AREA
    if is_short or isinstance(source, Pieces):
        return whole
    return _after(whole, inner, name)


def by_rows(
    whole: Reduction, reduced: Collection[tuple[Sequence[sympy.Expr], tuple[int, ...]]]
) -> Reduction:
    """Return a reduction that is over more dimensions than another one's as one of what a reduction
    over that one's dimensions gives, which its kernel computes beside it; ``reduced`` has the sizes
    and the dimensions of the others."""
    source = whole.source
    if isinstance(source, Pieces):
        return whole
    inner = [
        dims
        for sizes, dims in reduced
        if tuple(sizes) == tuple(source.sizes)
        and set(dims) < set(whole.dims)
        and dims == tuple(range(len(sizes) - len(dims), len(sizes)))
    ]
    return _after(whole, max(inner, key=lambda dims: len(dims)), None) if inner else whole


def _after(whole: Reduction, inner: Sequence[int], name: str | None) -> Reduction:
    """Return the reduction as one of what a reduction over the dimensions ``inner`` gives."""
    one = sympy.Integer(1)
    sizes = [one if dim in inner else size for dim, size in enumerate(whole.source.sizes)]
    first = replace(
        whole,
        name=f"{name or whole.name}_part",
        sizes=tuple(sizes),
        is_named=False,
        dims=tuple(inner),
        keepdim=True,
    )
    return replace(whole, source=first)
