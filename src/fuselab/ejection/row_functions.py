"""Choose functions of reductions that the kernel which reduces stores in the reductions' place.

A kernel that reads what another one has reduced computes a function of it, such as the reciprocal
of a standard deviation, once for each of its own elements, which are more. The kernel that reduces
computes it once for each row. So it does with the shares of a softmax, by which another kernel
weights vectors: it stores these in place of the row's largest element and sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from fuselab.ejection.functions import CPP_SLOW
from fuselab.ejection.kernels import Kernel, ancestors, schedule
from fuselab.ejection.loops import Input, Node, Pointwise, Reduction, View, operands_of
from fuselab.ejection.stored import numel

LEAST_READS = 4  # elements of the reading kernel for each value
LEAST_READS_OF_ARGUMENTS = 8  # where the value is computed from arguments, too
MOST_TRIED = 4  # functions that are tried one by one where not all can be stored


def scheduled(results: Sequence[Node], hints: Mapping[sympy.Symbol, int]) -> list[Kernel]:
    """Return the kernels of ``schedule``, in which those that reduce store slow functions of what
    they reduce where that needs no further kernel or load."""
    kernels = schedule(results, hints)
    if not any(isinstance(member.node, Reduction) for one in kernels for member in one.members):
        return kernels
    found = _slow_functions(kernels, hints)
    if not found:
        return kernels
    together = schedule([*results, *found], hints)
    if _are_better(together, kernels):
        return together
    kept: list[Node] = []
    for one in found if 1 < len(found) <= MOST_TRIED else ():
        others = schedule([*results, *kept, one], hints)
        if _are_better(others, kernels):
            kernels = others
            kept.append(one)
    return kernels


def _are_better(others: Sequence[Kernel], kernels: Sequence[Kernel]) -> bool:
    return len(others) == len(kernels) and _loads(others) <= _loads(kernels)


def _loads(kernels: Sequence[Kernel]) -> int:
    return sum(len(kernel.loads()) for kernel in kernels)


def _slow_functions(kernels: Sequence[Kernel], hints: Mapping[sympy.Symbol, int]) -> list[Node]:
    """Return the largest slow functions of other kernels' reductions that each kernel computes."""
    found: dict[Node, None] = {}
    for kernel in kernels:
        elements = math.prod(axis.hint for axis in (*kernel.row_axes, *kernel.column_axes))
        others = {
            member.node for other in kernels if other is not kernel for member in other.members
        }
        seen: set[Node] = set()
        stack = [member.node for member in kernel.members]
        while stack:
            node = stack.pop()
            if node in seen or node in others:
                continue
            seen.add(node)
            reads = elements / max(1, numel(node, hints))
            if _is_slow_function(node, others, reads):
                found[node] = None
            else:
                stack += reversed(operands_of(node))
    return list(found)


def _is_slow_function(node: Node, stored: set[Node], reads: float) -> bool:
    """Return whether a value that is read so often is a slow function of stored reductions and of
    numbers, or, as a softmax is, of arguments too."""
    if reads < LEAST_READS or not isinstance(node, Pointwise) or node.kind != "float":
        return False
    parts = list(ancestors(node, stored))
    is_slow = any(isinstance(one, Pointwise) and one.function in CPP_SLOW for one in parts)
    reductions = [one for one in parts if isinstance(one, Reduction)]
    unknown = [one for one in parts if one not in stored and not isinstance(one, (Pointwise, View))]
    is_known = reads >= LEAST_READS_OF_ARGUMENTS or not unknown
    is_known = is_known and all(isinstance(one, Input) for one in unknown)
    return is_slow and is_known and bool(reductions)
