"""Choose what a backward reads beside arguments: outputs, and small results of reductions.

The backward of a normalisation reads the mean of every row. Computed again, it takes a pass over
the rows, in which the forward has been already; kept, it takes an element for each row. What is
kept is as large as a row is short, so that keeping it moves next to no bytes. The mask of a dropout
is kept, too: it has a byte for each element, and its random numbers take longer to draw than that
takes to read.

An output is stored anyway. A backward reads it where that takes the place of reading more, as of
the terms of a sum, or of reducing rows again, as a softmax does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import fx

from fuselab.ejection.capture import Captured, with_sources
from fuselab.ejection.kernels import Kernel, ancestors, schedule
from fuselab.ejection.loops import (
    Call,
    Choice,
    Input,
    Node,
    Piece,
    Pieces,
    Pointwise,
    Reduction,
    Regrouped,
    Scan,
    View,
    Window,
    operands_of,
)
from fuselab.ejection.lower import Program
from fuselab.ejection.stored import numel

LEAST = 64  # elements that are reduced to one that is worth keeping
LEAST_OF_WINDOW = 16  # likewise, of a window to a position, which takes two sweeps to find,
LEAST_OF_ROW = 512  # and of a row


@dataclass(frozen=True)
class Residual:
    """A value that the forward computes, ``node``, as the backward reads it, ``kept``; ``formula``
    is the node of the captured graph that it comes from, which may have other dimensions of
    size 1."""

    node: Node
    kept: Input
    formula: fx.Node


def with_outputs(
    program: Program, captured: Captured, names: Sequence[str]
) -> tuple[Program, tuple[tuple[int, Input], ...]]:
    """Return the program with gradients that read outputs, and these with their places among the
    outputs; ``names`` are those of the outputs.

    An output of fewer bits than an argument is not read, because the values that went into it were
    not rounded to its dtype.
    """
    widest = max(
        (
            argument.tensor.dtype.itemsize
            for argument in captured.arguments
            if argument.tensor.is_floating_point()
        ),
        default=0,
    )
    behind = {one for node in program.gradients if node is not None for one in ancestors(node)}
    places = [
        place
        for place, (node, output) in enumerate(zip(program.outputs, captured.outputs, strict=True))
        if node in behind and _computed(node) is node and not captured.written
        if output.meta["val"].dtype.itemsize >= widest
    ]
    found: list[tuple[int, Input]] = []
    least = _work_of(program, captured) if places else (0, 0)
    for place in sorted(places, key=lambda one: -len({*ancestors(program.outputs[one])})):
        node = program.outputs[place]
        read = Input(names[place], node.sizes, node.kind)
        new = _Substitution({node: read})
        changed = tuple(None if one is None else new.of(one) for one in program.gradients)
        reading = replace(program, gradients=changed)
        work = _work_of(reading, captured)
        if _is_less(work, least):
            program, least = reading, work
            found.append((place, read))
    return program, tuple(sorted(found, key=lambda one: one[0]))


def _is_less(work: tuple[int, int], least: tuple[int, int]) -> bool:
    """Return whether one way reads less than another, or no more to speak of and reduces less."""
    (read, reduced), (least_read, least_reduced) = work, least
    return read < least_read or (
        reduced < least_reduced and (read - least_read) * LEAST <= least_read
    )


def _work_of(program: Program, captured: Captured) -> tuple[int, int]:
    """Return how many elements the kernels of a backward read, and how many values they reduce,
    where the forward keeps what is worth it."""
    kept, _ = with_residuals(program, captured, ())
    nodes = [node for node in kept.gradients if node is not None]
    kernels = schedule(nodes, captured.hints)
    read = sum(numel(load.tensor, captured.hints) for one in kernels for load in one.loads())
    reduced = {one for node in nodes for one in ancestors(node) if isinstance(one, Reduction)}
    return read, len(reduced)


def with_residuals(
    program: Program, captured: Captured, taken: Sequence[str]
) -> tuple[Program, tuple[Residual, ...]]:
    """Return the program with gradients that read what the forward keeps, and what that is.

    The forward's kernels stay those that it has without: they only store more. ``taken`` are names
    that the residuals must not have.
    """
    gradients = [node for node in program.gradients if node is not None]
    if not gradients:
        return program, ()
    chosen = _chosen(program, gradients, captured)
    if not _is_free(program.outputs, list(chosen), captured.hints):
        chosen = {node: formula for node, formula in chosen.items() if not _is_mask(node)}
    if not chosen or not _is_free(program.outputs, list(chosen), captured.hints):
        return program, ()
    names = set(taken)
    residuals = []
    for node, formula in chosen.items():
        name = next(one for one in _names(node.name, _operation(formula)) if one not in names)
        names.add(name)
        residuals.append(Residual(node, Input(name, node.sizes, node.kind), formula))
    new = _Substitution({one.node: one.kept for one in residuals})
    changed = tuple(None if node is None else new.of(node) for node in program.gradients)
    return replace(program, gradients=changed), tuple(residuals)


def _names(name: str, operation: str) -> Iterator[str]:
    """Yield names for a residual, such as ``softmax_amax``: the user's name of the value that it is
    a step to, and the operation."""
    if operation and not name.endswith(operation):
        name = f"{name}_{operation}"
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


def _operation(formula: fx.Node) -> str:
    packet = getattr(formula.target, "overloadpacket", None)
    return str(packet.__name__) if packet is not None else ""


def _chosen(program: Program, gradients: Sequence[Node], captured: Captured) -> dict[Node, fx.Node]:
    """Return the nodes that gradients read and that are worth keeping, the largest expressions of
    the forward, each with the node of the captured graph."""
    forward = {one for output in program.outputs for one in ancestors(output)}
    own = {*program.outputs, *gradients}
    upstream = {*captured.upstream}
    formulas: dict[Node, fx.Node] = {}
    for formula, value in program.lowered.items():
        node = _computed(value)
        if node is None or node in own or upstream & with_sources([formula]):
            continue
        if node in forward or node.kind == "int":  # positions are found for the backward alone
            formulas.setdefault(node, formula)
    hints = captured.hints
    found: dict[Node, fx.Node] = {}
    seen: set[Node] = set()
    stack = list(reversed(gradients))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in formulas and (_is_mask(node) or _is_worth_it(node, hints)):
            found[node] = formulas[node]
        else:
            stack += reversed(operands_of(node))
    for node in list(found):
        if not _is_mask(node) and not _is_reduced_anew(node, found):
            del found[node]
    return found


def _computed(value: Any) -> Node | None:
    """Return the node of which ``value`` has the elements in their order, if it is one of numbers
    that a kernel computes, or a dropout's mask: of a view, its source if they differ in dimensions
    of size 1 alone."""
    if isinstance(value, View):
        source = _computed(value.source)
        kept = [size for size in value.sizes if size != 1]
        same = source and kept == [size for size in source.sizes if size != 1]
        return source if same and len(set(kept)) == len(kept) else None
    is_computed = isinstance(value, (Pointwise, Reduction)) and value.kind in ("float", "int")
    return value if is_computed or _is_mask(value) else None


def _is_mask(value: Any) -> bool:
    """Return whether a node is the mask of a dropout."""
    return isinstance(value, Pointwise) and value.function == "kept"


def _is_reduced_anew(node: Node, others: Container[Node]) -> bool:
    """Return whether a node takes a reduction to compute, where the others are known."""
    stack: list[Node] = [node]
    while stack:
        one = stack.pop()
        if isinstance(one, Reduction):
            return True
        stack += (operand for operand in operands_of(one) if operand not in others)
    return False


def _is_worth_it(node: Node, hints: Mapping[sympy.Symbol, int]) -> bool:
    """Return whether a node is computed from a reduction of many more elements than it has."""
    size = numel(node, hints)
    reductions = [one for one in ancestors(node) if isinstance(one, Reduction)]
    if node.kind == "float":
        return any(numel(one.source, hints) >= LEAST * size for one in reductions)
    return any(
        numel(one.source, hints) >= _least_of_positions(one, hints) * size
        for one in reductions
        if one.places is not None
    )


def _least_of_positions(reduction: Reduction, hints: Mapping[sympy.Symbol, int]) -> float:
    """Return how many elements make a position worth keeping: few of a window, which the backward
    would go through in a kernel of its own, unless windows overlap so much that it takes the
    forward as long; many of a row, which a program of the backward has in registers anyway."""
    inner = {*ancestors(reduction)}
    if not any(isinstance(one, Choice) for one in inner):
        return LEAST_OF_ROW
    read = sum(numel(one, hints) for one in inner if isinstance(one, Input))
    return LEAST_OF_WINDOW if numel(reduction.source, hints) <= 2 * read else math.inf


def _is_free(
    outputs: Sequence[Node], kept: Sequence[Node], hints: Mapping[sympy.Symbol, int]
) -> bool:
    """Return whether the forward that keeps the nodes has as many kernels, which read as much."""

    def work(kernels: Sequence[Kernel]) -> tuple[int, int]:
        return len(kernels), sum(len(kernel.loads()) for kernel in kernels)

    return work(schedule([*outputs, *kept], hints)) == work(schedule(outputs, hints))


class _Substitution:
    """Replaces nodes, and makes those anew that are computed from them."""

    def __init__(self, replaced: Mapping[Node, Node]) -> None:
        self.known: dict[Node, Node] = dict(replaced)

    def of(self, node: Node) -> Node:
        """Return a node, computed from what takes the place of its operands."""
        if node not in self.known:
            changed = any(self.of(one) is not one for one in operands_of(node))
            self.known[node] = self._anew(node) if changed else node
        return self.known[node]

    def _anew(self, node: Node) -> Node:
        if isinstance(node, (View, Reduction, Scan, Window, Regrouped)):
            return replace(node, source=self.of(node.source))
        if isinstance(node, Choice):
            places = tuple(None if one is None else self.of(one) for one in node.places)
            return replace(node, source=self.of(node.source), places=places)
        if isinstance(node, Pieces):
            parts = tuple(part for one in node.parts if isinstance(part := self.of(one), Piece))
            return replace(node, parts=parts)
        if isinstance(node, Piece):
            return replace(node, value=self.of(node.value))
        if isinstance(node, Pointwise):
            return replace(node, operands=tuple(map(self._operand, node.operands)))
        assert isinstance(node, Call), node
        return replace(node, operands=tuple(map(self._operand, node.operands)))

    def _operand(self, operand: Any) -> Any:
        if isinstance(operand, tuple):
            return tuple(map(self._operand, operand))
        return self.of(operand) if isinstance(operand, Node) else operand
