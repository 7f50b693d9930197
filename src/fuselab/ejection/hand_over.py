"""Choose values that a C++ kernel stores for a later one, which would compute them again.

The gradient of a group norm's weight is a sum over other dimensions than the rows over which the
gradient of its input goes, of values that both kernels need. Where these take long, as those of an
activation do, a CPU reads them from memory sooner than it computes them. Values of whole rows, such
as the reciprocal of a standard deviation, are few, and always stored.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import sympy

from fuselab.ejection.functions import CPP_DIVISIONS, CPP_SLOW
from fuselab.ejection.kernels import Kernel
from fuselab.ejection.loops import Node, Pointwise, Reduction, operands_of
from fuselab.ejection.row_functions import scheduled
from fuselab.ejection.row_sums import SummingKernel, with_row_sums
from fuselab.ejection.stored import numel


def with_handed_over(
    results: Sequence[Node], kernels: Sequence[Kernel], hints: Mapping[sympy.Symbol, int]
) -> list[Kernel]:
    """Return kernels for ``results`` that store slow values for each other; ``kernels`` themselves
    where that would need another kernel, or more loads."""
    wanted = _shared(with_row_sums(kernels), hints)
    if not wanted:
        return list(kernels)
    handing = scheduled([*results, *wanted], hints)
    is_better = len(handing) == len(kernels) and _loads(handing) <= _loads(kernels)
    return handing if is_better else list(kernels)


def _loads(kernels: Sequence[Kernel]) -> int:
    """Return how many tensors the kernels read at each of their elements."""
    return sum(
        set(kernel.row_axes + kernel.column_axes) <= {axis for part in load.index for axis in part}
        for kernel in kernels
        for load in kernel.loads()
    )


def _shared(kernels: Sequence[SummingKernel], hints: Mapping[sympy.Symbol, int]) -> list[Node]:
    """Return the largest slow values that a kernel computes again for its sums."""
    found: dict[Node, None] = {}
    for place, one in enumerate(kernels):
        members = [member.node for member in one.kernel.members]
        if not any(isinstance(node, Reduction) for node in members):
            continue
        for earlier in kernels[:place]:
            known = set(_computed(earlier.kernel, kernels))
            whole = math.prod(
                axis.hint for axis in earlier.kernel.row_axes + earlier.kernel.column_axes
            )
            found |= dict.fromkeys(_slow_parts(one.kernel, kernels, known, whole, hints))
    return list(found)


def _sources(node: Node, kernel: Kernel, kernels: Sequence[SummingKernel]) -> Iterator[Node]:
    """Yield the nodes from which a kernel computes a node: not what other kernels store."""
    for one in operands_of(node):
        stored = any(other.kernel is not kernel and other.kernel.computes(one) for other in kernels)
        if not stored:
            yield one


def _computed(kernel: Kernel, kernels: Sequence[SummingKernel]) -> Iterator[Node]:
    """Yield every node that a kernel computes."""
    seen: set[Node] = set()
    stack = [member.node for member in kernel.members]
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            yield node
            stack += _sources(node, kernel, kernels)


def _slow_parts(
    kernel: Kernel,
    kernels: Sequence[SummingKernel],
    known: set[Node],
    whole: int,
    hints: Mapping[sympy.Symbol, int],
) -> Iterator[Node]:
    """Yield the largest slow values of a kernel among those that another one knows."""
    seen: set[Node] = set()
    stack = [member.node for member in kernel.members]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in known and _is_slow(node, numel(node, hints) == whole, hints):
            yield node
        else:
            stack += reversed(list(_sources(node, kernel, kernels)))


def _is_slow(node: Node, is_whole: bool, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether a value takes long to compute: for each element, where it has all elements."""
    if not isinstance(node, Pointwise) or node.kind != "float":
        return False
    slow = CPP_SLOW - CPP_DIVISIONS if is_whole else CPP_SLOW
    size = numel(node, hints)
    seen: set[Node] = set()
    stack: list[Node] = [node]
    while stack:
        one = stack.pop()
        if one in seen or isinstance(one, Reduction) or numel(one, hints) < size:
            continue
        seen.add(one)
        if isinstance(one, Pointwise) and one.function in slow:
            return True
        stack += operands_of(one)
    return False
