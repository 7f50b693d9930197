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

from fuselab.ejection.loops import Node, Pieces, Pointwise, Reduction, View, operands_of

LEAST_AREA = 32  # elements of a row of the first step; the second step reads one value for each
MOST_COLUMNS = 16384  # of such a row where everything is reduced
LEAST_ROWS = 256


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


def row_by_row(whole: Reduction, hint: Callable[[sympy.Expr], int]) -> Reduction:
    """Return a reduction of everything as one of what a reduction over the last dimensions gives,
    if an operand is the same along these, or along all others: it is loaded once for a row, or for
    many rows, where a loop over everything would find out for each element where it lies."""
    source = whole.source
    rank = len(source.sizes)
    if len(whole.dims) < rank or isinstance(source, Pieces) or whole.places is not None:
        return whole
    inner = _columns_of_operands(source)
    columns = hint(sympy.prod(source.sizes[rank - inner :]))
    rows = hint(sympy.prod(source.sizes[: rank - inner]))
    if not inner or not LEAST_AREA <= columns <= MOST_COLUMNS or rows < LEAST_ROWS:
        return whole
    return _after(whole, range(rank - inner, rank), None)


def _columns_of_operands(source: Node) -> int:
    """Return the number of last dimensions along which an operand of ``source``, or of what it is
    computed from element by element, is the same, or the only ones along which it is not; 0 if
    there is no such operand."""
    stack, seen = [source], {source}
    while stack:
        node = stack.pop()
        if not isinstance(node, (Pointwise, View)) or node.sizes != source.sizes:
            continue
        for operand in operands_of(node):
            changes = [size != 1 for size in operand.sizes]
            behind = len(changes) - len(_without_last(changes, False))
            own = len(changes) - len(_without_last(changes, True))
            if any(changes) and behind:
                return behind
            if own and not any(changes[: len(changes) - own]) and own < len(source.sizes):
                return own
            if operand not in seen:
                seen.add(operand)
                stack.append(operand)
    return 0


def _without_last(flags: Sequence[bool], flag: bool) -> Sequence[bool]:
    """Return the flags without those at the end that are ``flag``."""
    end = len(flags)
    while end and flags[end - 1] == flag:
        end -= 1
    return flags[:end]


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
