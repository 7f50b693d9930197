"""Join sums over the rows of a kernel to that kernel.

The gradient of a normalisation's weight is a sum over the rows over which the gradient of its input
goes, of values that both need. A C++ kernel computes both in one pass: it adds to one sum for each
column, row after row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from fuselab.ejection.kernels import Kernel, Member
from fuselab.ejection.loops import (
    Apply,
    Axis,
    Expression,
    Index,
    Load,
    Node,
    Position,
    Reduced,
    Reduction,
    Scan,
    Scanned,
    children,
    walk,
)
from fuselab.ejection.stored import behind_calls


@dataclass(frozen=True)
class SummingKernel:
    """A kernel, and those of its nodes that are sums over its rows: their values are the terms."""

    kernel: Kernel
    sums: frozenset[Node] = frozenset()


def with_row_sums(kernels: Sequence[Kernel], to_pointwise: bool = False) -> list[SummingKernel]:
    """Return the kernels, those that only sum over the rows of an earlier one joined to it.

    With ``to_pointwise``, sums that keep the innermost axis also join kernels without reductions.
    """
    found: list[SummingKernel] = []
    for kernel in kernels:
        for place, one in enumerate(found):
            joined = _joined(one, kernel, to_pointwise)
            if joined is not None and not _reads(kernel, found[place + 1 :]):
                found[place] = joined
                break
        else:
            found.append(SummingKernel(kernel))
    return found


def _reads(kernel: Kernel, others: Sequence[SummingKernel]) -> bool:
    """Return whether a kernel reads what one of the others computes."""
    tensors = {one for load in kernel.loads() for one in behind_calls(load.tensor)}
    return any(member.node in tensors for one in others for member in one.kernel.members)


def _joined(one: SummingKernel, sums: Kernel, to_pointwise: bool) -> SummingKernel | None:
    """Return a kernel with the sums of another one, or None if those are not sums over its rows."""
    kernel = one.kernel
    terms = {node: value.operand for node, value in sums.values.items() if _is_sum(value)}
    if len(terms) < len(sums.members) or any(load.tensor in one.sums for load in sums.loads()):
        return None
    if any(isinstance(member.node, Scan) for member in kernel.members):
        return None  # which goes over the columns of a row in their order
    axes = _same_axes(sums, kernel)
    kept = {axes.get(axis) for axis in sums.row_axes}
    summed = {axes.get(axis) for axis in sums.column_axes}
    if to_pointwise and not kernel.column_axes and not any(map(_is_reduction, kernel.members)):
        if {*kept, *summed} != set(kernel.row_axes) or kernel.row_axes[-1] not in kept:
            return None
        kernel = replace(
            kernel,
            row_axes=tuple(axis for axis in kernel.row_axes if axis in summed),
            column_axes=tuple(axis for axis in kernel.row_axes if axis in kept),
        )
    is_summing = (
        bool(one.sums) or any(map(_is_reduction, kernel.members)) or kernel is not one.kernel
    )
    if not is_summing or kept != set(kernel.column_axes) or summed != set(kernel.row_axes):
        return None

    def mapped(index: Index) -> Index:
        return tuple(tuple(axes[axis] for axis in entry) for entry in index)

    values = _rewritten(list(terms.values()), kernel, mapped)
    if values is None:
        return None
    named = {values[old]: name for old, name in sums.names.items() if old in values}
    members = tuple(Member(member.node, mapped(member.index)) for member in sums.members)
    return SummingKernel(
        replace(
            kernel,
            members=(*kernel.members, *members),
            values={**kernel.values, **{node: values[term] for node, term in terms.items()}},
            names={**named, **kernel.names},
        ),
        one.sums | terms.keys(),
    )


def _is_sum(value: Expression) -> TypeGuard[Reduced]:
    return isinstance(value, Reduced) and (value.function, value.kind) == ("sum", "float")


def _is_reduction(member: Member) -> bool:
    return isinstance(member.node, Reduction)


def _same_axes(sums: Kernel, kernel: Kernel) -> Mapping[Axis, Axis]:
    """Return the kernel's axis for each axis of the sums, by the tensors that both read."""
    indices = {load.tensor: load.index for load in kernel.loads()}
    indices |= {member.node: member.index for member in kernel.members}
    found: dict[Axis, Axis] = {}
    for load in sums.loads():
        for own, other in zip(load.index, indices.get(load.tensor, ()), strict=False):
            if len(own) == len(other):
                found |= dict(zip(own, other, strict=True))
    return found


def _rewritten(
    terms: Sequence[Expression], kernel: Kernel, mapped: Callable[[Index], Index]
) -> dict[Expression, Expression] | None:
    """Return each expression of ``terms`` over the kernel's axes, with the kernel's own values in
    place of those that it computes, or None if they are read at other places."""
    computed = {member.node: member for member in kernel.members}
    found: dict[Expression, Expression] = {}
    for one in walk(terms):
        if isinstance(one, Load) and one.tensor in computed:
            index = mapped(one.index)
            if index != computed[one.tensor].index[: len(index)]:
                return None
            found[one] = kernel.values[one.tensor]
        elif isinstance(one, Load) and children(one):
            return None  # at a position that the kernel computes
        elif isinstance(one, Load):
            found[one] = Load(one.tensor, mapped(one.index))
        elif isinstance(one, Position):
            found[one] = Position(*mapped((one.axes,)))
        elif isinstance(one, Apply):
            found[one] = Apply(one.function, tuple(found[each] for each in one.operands), one.kind)
        elif isinstance(one, (Reduced, Scanned)):
            return None
        else:
            found[one] = one
    return found
