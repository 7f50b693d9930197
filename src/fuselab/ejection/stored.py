"""The memory of nodes: which are stored for a tensor, where it is read, which are one number."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import cast

import sympy
import torch

from fuselab.ejection.exact_sizes import in_example
from fuselab.ejection.integers import NARROWING
from fuselab.ejection.loops import (
    SAME,
    Call,
    Constant,
    Input,
    Node,
    Piece,
    Pieces,
    Pointwise,
    Regrouped,
    View,
    Window,
    operands_of,
)


def memory_of(tensor: Node) -> Node:
    """Return the node whose memory a loaded tensor is in."""
    while isinstance(tensor, (Window, Regrouped)):
        tensor = tensor.source
    return tensor


def stored_as(tensor: Node) -> Node:
    """Return the node whose memory a tensor is in that a kernel stores, or that is an argument."""
    memory = memory_of(tensor)
    while isinstance(memory, Call) and memory.operator == SAME:
        memory = memory_of(cast("Node", memory.operands[0]))
    return memory


def exact_in(node: Node) -> set[str] | None:
    """Return the tensors of which a node has elements as they are, or with another sign, so that
    it is stored exactly in a dtype that holds theirs; None where it has others."""
    if isinstance(node, Input):
        return {node.name} if node.kind == "float" else None
    if isinstance(node, Pointwise):
        if node.function not in _EXACT:
            return None
        operands = node.operands[1:] if node.function == "where" else node.operands
    elif isinstance(node, (View, Window, Regrouped, Piece, Pieces)):
        operands = operands_of(node)
    else:
        return None
    found: set[str] = set()
    for one in operands:
        if isinstance(one, Constant) and one.value in _EXACT_NUMBERS:
            continue
        names = exact_in(one) if isinstance(one, Node) else None
        if names is None:
            return None
        found |= names
    return found


def behind_calls(tensor: Node) -> Iterator[Node]:
    """Yield the tensor in memory that ``tensor`` is or lies in; for a PyTorch call's result, first
    those that it is computed from, and so on."""
    memory = memory_of(tensor)
    if isinstance(memory, Call):
        for operand in operands_of(memory):
            yield from behind_calls(operand)
    yield memory


def leaves(node: Node) -> tuple[Node, ...]:
    """Return what is stored one by one where ``node`` is stored: its parts, or itself."""
    if isinstance(node, Pieces):
        return tuple(leaf for one in node.parts for leaf in leaves(one))
    if isinstance(node, Piece) and isinstance(node.value, Pieces):
        return leaves(node.value)
    return (node,)


def paths(node: Pieces) -> dict[Node, tuple[tuple[int, Piece], ...]]:
    """Return for each leaf the parts that lead to it, each with the dimension that it is cut along,
    the outermost first."""
    found: dict[Node, tuple[tuple[int, Piece], ...]] = {}
    for one in node.parts:
        step = ((node.dim, one),)
        if isinstance(one.value, Pieces):
            found |= {leaf: (*step, *path) for leaf, path in paths(one.value).items()}
        else:
            found[one] = step
    return found


def constant_of(node: Node) -> Constant | None:
    """Return the number that all elements of a node are; None where they are computed."""
    if isinstance(node, Piece):
        return constant_of(node.value)
    if isinstance(node, View):
        return constant_of(node.source)
    if isinstance(node, Pointwise) and node.function == "same":
        (operand,) = node.operands
        return (
            operand
            if isinstance(operand, Constant)
            else (constant_of(operand) if isinstance(operand, Node) else None)
        )
    return None


def numel(node: Node, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return how many elements a node has in the example."""
    return math.prod(in_example(size, hints) for size in node.sizes)


def folded(node: Pointwise) -> Constant | None:
    """Return the value of a function of numbers, computed in float64."""
    if node.function == "same" or not node.operands:
        return None
    found = [constant_of(one) if isinstance(one, Node) else one for one in node.operands]
    numbers = [one for one in found if isinstance(one, Constant)]
    if len(numbers) < len(found):
        return None
    if node.function.startswith("to_"):
        (number,) = numbers
        return Constant({"float": float, "int": int, "bool": bool}[node.kind](number.value))
    if node.function in NARROWING.values():
        (number,) = numbers
        return Constant(torch.tensor(number.value).to(getattr(torch, node.function)).item())
    function = getattr(torch, _TORCH_NAMES.get(node.function, node.function), None)
    if function is None:
        return None
    held = [
        torch.tensor(one.value, dtype=torch.float64 if isinstance(one.value, float) else None)
        for one in numbers
    ]
    return Constant(function(*held).item())


# Functions whose result is one of their operands, or its negative, and numbers of every dtype.
_EXACT = frozenset(("same", "neg", "abs", "relu", "maximum", "minimum", "where"))
_EXACT_NUMBERS = (0, 1, -1, math.inf, -math.inf)

# PyTorch's names of scalar functions that have another one.
_TORCH_NAMES = {
    "and": "bitwise_and",
    "not": "logical_not",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "invert": "bitwise_not",
    "intdiv": "floor_divide",
    "shl": "bitwise_left_shift",
    "shr": "bitwise_right_shift",
}
