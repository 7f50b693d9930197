"""Join sums over the rows of a kernel to that kernel.

The gradient of a normalisation's weight is a sum over the rows over which the gradient of its input
goes, of values that both need. A C++ kernel computes both in one pass: it adds to one sum for each
column, row after row. So does a Triton kernel, which also takes sums over all elements, as the
gradient of a scalar is: it leaves a sum for each column, which a small kernel adds up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeGuard

from fuselab.ejection.kernels import Kernel, Member
from fuselab.ejection.loops import (
    Apply,
    Axis,
    Constant,
    Expression,
    Index,
    Load,
    Node,
    Position,
    Reduced,
    Reduction,
    Scan,
    Scanned,
    Size,
    children,
    walk,
)
from fuselab.ejection.stored import behind_calls

LEAST_COLUMNS = 64  # for whose sums a kernel gives up running over all elements in one loop


@dataclass(frozen=True)
class SummingKernel:
    """A kernel, and those of its nodes that are sums over its rows: their values are the terms."""

    kernel: Kernel
    sums: frozenset[Node] = frozenset()


def with_row_sums(kernels: Sequence[Kernel], to_pointwise: bool = False) -> list[SummingKernel]:
    """Return the kernels, those that only sum over the rows of an earlier one joined to it.

    With ``to_pointwise``, sums that keep the innermost axis also join kernels without reductions,
    and so do sums over everything, in two steps.
    """
    found: list[SummingKernel] = []
    for kernel in kernels:
        split = _in_two_steps(kernel) if to_pointwise else None
        for place, one in enumerate(found):
            if _reads(kernel, found[place + 1 :]):
                continue
            joined = _joined(one, kernel, to_pointwise)
            if joined is None and split is not None:
                joined = _joined(one, split[0], to_pointwise)
                if joined is not None:
                    found.append(SummingKernel(split[1]))
            if joined is not None:
                found[place] = joined
                break
        else:
            found.append(SummingKernel(kernel))
    return found


def _in_two_steps(kernel: Kernel) -> tuple[Kernel, Kernel] | None:
    """Return a kernel of sums over all elements as one of sums for each column, the innermost axis,
    and one that adds those up; None if it is no such kernel."""
    sums = [one for one in walk(list(kernel.values.values())) if isinstance(one, Reduced)]
    if kernel.row_axes or len(kernel.column_axes) < 2 or not sums or not all(map(_is_sum, sums)):
        return None
    *outer, inner = kernel.column_axes
    if inner.hint < LEAST_COLUMNS or any(isinstance(one, Reduced) for one in _terms(sums)):
        return None
    axis = Axis(inner.size, inner.hint)
    firsts: dict[Expression, Node] = {}
    parts: dict[Expression, Expression] = {}
    for one in sums:
        name = f"{kernel.names.get(one, 'total')}_of_columns"
        first = Reduction(name, (inner.size,), "float", "", False, "sum", _summed(kernel, one))
        firsts[one] = first
        parts[one] = Reduced("sum", Load(first, ((axis,),)), "float")
    values = _above(kernel, parts)
    if values is None:
        return None
    columns = Kernel(
        tuple(Member(first, ((inner,),)) for first in firsts.values()),
        (inner,),
        tuple(outer),
        kernel.bound,
        {first: one for one, first in firsts.items()},
        kernel.names,
        kernel.users_names,
    )
    members = tuple(
        Member(one.node, (*one.index[: len(one.node.sizes)], (axis,))) for one in kernel.members
    )
    names = {parts.get(one, one): name for one, name in kernel.names.items()}
    return columns, Kernel(members, (), (axis,), kernel.bound, values, names, kernel.users_names)


def _terms(sums: Sequence[Expression]) -> list[Expression]:
    """Return all expressions that are summed up, and what they are computed from."""
    return walk([child for one in sums for child in children(one)])


def _summed(kernel: Kernel, value: Expression) -> Node:
    """Return the node that a sum of the kernel is over."""
    found = [member.node for member in kernel.members if isinstance(member.node, Reduction)]
    own = next((one for one in found if kernel.values.get(one) is value), found[0])
    return own.source


def _above(kernel: Kernel, parts: Mapping[Expression, Expression]) -> dict[Node, Expression] | None:
    """Return the values of a kernel with others in the place of its sums; None if they read an
    element of a column besides."""
    known = dict(parts)
    for one in walk(list(kernel.values.values()), leaves=parts):
        if one in known:
            continue
        if isinstance(one, Apply):
            operands = tuple(known[each] for each in one.operands)
            known[one] = Apply(one.function, operands, one.kind)
        elif isinstance(one, (Constant, Size)) or (isinstance(one, Load) and not any(one.index)):
            known[one] = one
        else:
            return None
    return {node: known[value] for node, value in kernel.values.items()}


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
