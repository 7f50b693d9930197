"""Choose values that a kernel stores because another reads them at several places.

The gradient of a slice is a value at a shifted place. Where the gradients of several slices are
added up, each element needs a value at several places, and a kernel that computes it anew at each
of them loads and divides as many times. Where that is most of its work, one kernel stores the value
and another one reads it. A GPU computes while it waits for memory, so that there it has to be
nearly all of the work: the gradient of an edge detector would load each of nine neighbours' nine
neighbours, eight times.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import sympy

from fuselab.ejection.functions import CPP_SLOW
from fuselab.ejection.kernels import Binding, DoesNotFitError, Evaluation, Kernel, schedule
from fuselab.ejection.loops import (
    Apply,
    Choice,
    Load,
    Node,
    Pointwise,
    chosen_in,
    operands_of,
    walk,
)
from fuselab.errors import EjectError

# What steps of a kernel cost, in loads of an element of its own place.
CHOSEN_LOAD, STORE, SLOW, STEP = 2.0, 3.0, 4.0, 0.25
WORTH = 0.6  # of the cost before, in C++
WORTH_ON_A_GPU = 0.3
_SUMS = ("add", "sub")
_MULTIPLES = ("neg", "mul", "div")


def with_values_read_apart(
    results: Sequence[Node],
    kernels: Sequence[Kernel],
    hints: Mapping[sympy.Symbol, int],
    worth: float = WORTH,
) -> list[Kernel]:
    """Return kernels for ``results`` of which some store values that others read at several places
    each, as long as that leaves at most a share ``worth`` of what they cost; ``kernels`` themselves
    where it leaves more."""
    held, apart = list(kernels), list[Node]()
    while more := [
        node for kernel in held for node in _read_apart(kernel, held, hints) if node not in apart
    ]:
        try:
            storing = schedule(results, hints, [*apart, *more])
        except (DoesNotFitError, EjectError):  # such a value cannot be stored alone
            break
        if _cost(storing) > worth * _cost(held):
            break
        held, apart = storing, [*apart, *more]
    return held


def _read_apart(
    kernel: Kernel, kernels: Sequence[Kernel], hints: Mapping[sympy.Symbol, int]
) -> list[Node]:
    """Return the largest values of a kernel that it computes at several places of one element."""
    if kernel.has_columns:
        return []
    others = {member.node for other in kernels for member in other.members}
    stored = frozenset(others - {member.node for member in kernel.members})
    evaluation = Evaluation(Binding(hints, kernel.bound), kernel.members, stored)
    for member in kernel.members:
        evaluation.at(member.node, member.index)
    places: dict[Node, int] = {}
    for node, _ in evaluation.known:
        places[node] = places.get(node, 0) + 1
    found: dict[Node, None] = {}
    stack, seen = [member.node for member in kernel.members], set(stored)
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        is_value = isinstance(node, Pointwise) and node.kind == "float"
        if is_value and places.get(node, 0) > 1:
            found[node] = None
        else:
            stack += reversed(operands_of(node))
    return _without_simple_functions(list(found))


def _without_simple_functions(nodes: Sequence[Node]) -> list[Node]:
    """Return the values of which others are multiples or sums, in the place of these: an edge
    detector's gradients are read with six factors each."""
    bases = dict.fromkeys(map(_multiplied, nodes))
    return [
        node
        for node in bases
        if not (
            isinstance(node, Pointwise)
            and node.function in _SUMS
            and all(_multiplied(one) in bases for one in operands_of(node))
        )
    ]


def _multiplied(node: Node) -> Node:
    """Return the computed value that a node is a multiple of, or has a border of numbers around."""
    while isinstance(node, Pointwise) and (source := _only_source(node)) is not None:
        node = source
    return node


def _only_source(node: Pointwise) -> Pointwise | None:
    nodes = operands_of(node)
    if node.function == "where" and len(nodes) == 2 and isinstance(nodes[1], Choice):
        source = nodes[1].source
    elif node.function in _MULTIPLES and len(nodes) == 1:
        (source,) = nodes
    else:
        return None
    return source if isinstance(source, Pointwise) and source.kind == "float" else None


def _cost(kernels: Sequence[Kernel]) -> float:
    """Return what kernels cost, in loads of one element each."""
    return sum(
        math.prod(axis.hint for axis in (*kernel.row_axes, *kernel.column_axes))
        * (STORE * len(kernel.members) + sum(map(_cost_of, walk([*kernel.values.values()]))))
        for kernel in kernels
    )


def _cost_of(expression: object) -> float:
    if isinstance(expression, Load):
        return CHOSEN_LOAD if chosen_in(expression.index) else 1.0
    if isinstance(expression, Apply):
        return SLOW if expression.function in CPP_SLOW else STEP
    return 0.0
