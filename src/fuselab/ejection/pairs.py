"""Find the operands of a kernel that lie interleaved in memory: every second element is one's.

A rotation of neighbouring elements reads ``x[..., ::2]`` and ``x[..., 1::2]``. Read one by one,
each takes half of every cache line, an element at a time. A Triton kernel reads two neighbours as
one integer instead, where the launcher sees that the layout allows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuselab.ejection.loops import Constant, Node, Piece, Window
from fuselab.ejection.plan import KernelPlan, Operand

Pair = tuple[Operand, Operand]


def pairs_of(plan: KernelPlan) -> list[Pair]:
    """Return the pairs of operands of which the second may have the element behind each of the
    first one's. Whether it does depends on the layout of the tensors (``Sweep.in_pairs``)."""
    computed = [
        one for one in plan.stored if one.node and not isinstance(plan.stores[one.node], Constant)
    ]
    return [*_pairs(plan.loads), *_pairs(computed)]


def _pairs(operands: Sequence[Operand]) -> Iterator[Pair]:
    left = [one for one in operands if _is_every_second(one.node) and not one.steps]
    while left:
        one = left.pop(0)
        other = next((each for each in left if _are_neighbours(one, each)), None)
        if other is not None:
            left.remove(other)
            yield (one, other) if _start(one) < _start(other) else (other, one)


def _is_every_second(node: Node | None) -> bool:
    return isinstance(node, (Window, Piece)) and node.step == 2 and node.start in (0, 1)


def _start(operand: Operand) -> int:
    assert isinstance(operand.node, (Window, Piece))
    return int(operand.node.start)


def _are_neighbours(one: Operand, other: Operand) -> bool:
    """Return whether two operands are the elements at even and at odd places of one tensor, read or
    written at the same index. Of parts that are written the kernel does not know the whole."""
    same = isinstance(one.node, Piece)
    if isinstance(one.node, Window) and isinstance(other.node, Window):
        same = (one.node.source, one.node.dim) == (other.node.source, other.node.dim)
    return same and one.index == other.index and {_start(one), _start(other)} == {0, 1}
