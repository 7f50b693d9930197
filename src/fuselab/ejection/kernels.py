"""Which nodes one kernel computes, and over which loops.

A kernel has rows, which its programs share out, and columns, over which a program sweeps. All of
its reductions are over all of its columns. What it stores belongs to an element, a row and a
column, or to a row. A kernel without reductions has rows only.

A node joins a kernel if it can be evaluated over the kernel's axes. This is tried: the node gets an
axis of its own for each dimension, and wherever it reads a reduction of the kernel, its index there
must be the index at which the kernel computes it, which ties its axes to the kernel's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import sympy

from fuselab.ejection.conditions import condition, in_kind
from fuselab.ejection.exact_sizes import in_example
from fuselab.ejection.loops import (
    Along,
    Apply,
    Axis,
    Call,
    Choice,
    ChosenAxis,
    Constant,
    Expression,
    Index,
    Input,
    Load,
    Node,
    Piece,
    Pieces,
    Pointwise,
    Position,
    Reduced,
    Reduction,
    Regrouped,
    Scan,
    Scanned,
    Size,
    View,
    Window,
    chosen_axis,
    operands_of,
    position,
    walk,
)
from fuselab.ejection.parts import unexpanded
from fuselab.ejection.stored import constant_of, leaves, memory_of
from fuselab.errors import EjectError
from fuselab.runtime.sweep import COLUMN_LOOPS


class DoesNotFitError(Exception):
    """A node cannot be computed over a kernel's axes."""


class Binding:
    """The axes that have been replaced by others: tied to a kernel's, or split."""

    def __init__(self, hints: Mapping[sympy.Symbol, int], bound: Mapping[Axis, tuple[Axis, ...]]):
        self.hints = hints
        self.bound = dict(bound)
        self.free: set[Axis] = set()  # axes that may still be tied

    def hint(self, size: sympy.Expr) -> int:
        return in_example(size, self.hints)

    def fresh(self, size: sympy.Expr) -> tuple[Axis, ...]:
        """Return a new axis, which may be tied, or no axis for size 1."""
        if size == 1:
            return ()
        axis = Axis(size, self.hint(size))
        self.free.add(axis)
        return (axis,)

    def resolve(self, axes: Sequence[Axis]) -> tuple[Axis, ...]:
        found: list[Axis] = []
        for axis in axes:
            parts = self.bound.get(axis)
            found.extend((axis,) if parts is None else self.resolve(parts))
        return tuple(found)

    def resolved(self, index: Index) -> Index:
        return tuple(map(self.resolve, index))

    def split(self, axis: Axis, outer: sympy.Expr) -> tuple[Axis, Axis]:
        """Split an axis into an outer one of size ``outer`` and the rest."""
        inner = quotient(axis.size, outer)
        if isinstance(axis, ChosenAxis):
            by = Constant(int(inner)) if inner.is_number else Size(inner)
            above = Apply("intdiv", (axis.value, by), "int")
            below = Apply("sub", (axis.value, Apply("mul", (above, by), "int")), "int")
            return (
                chosen_axis(outer, self.hint(outer), above),
                chosen_axis(inner, self.hint(inner), below),
            )
        parts = Axis(outer, self.hint(outer)), Axis(inner, self.hint(inner))
        if axis in self.free:
            self.free.update(parts)
        self.bound[axis] = parts
        return parts

    def regroup(self, axes: Sequence[Axis], sizes: Sequence[sympy.Expr]) -> Index:
        """Return the axes in groups whose sizes multiply to ``sizes``, splitting where a group
        ends within an axis. Raises DoesNotFitError."""
        remaining = list(self.resolve(axes))
        groups: list[tuple[Axis, ...]] = []
        for size in sizes:
            group: list[Axis] = []
            while not equal(missing := quotient(size, product(group)), sympy.Integer(1), self):
                if not remaining:
                    raise DoesNotFitError
                axis = remaining.pop(0)
                if self.hint(missing) % axis.hint:
                    if axis.hint % self.hint(missing):
                        raise DoesNotFitError
                    axis, rest = self.split(axis, missing)
                    remaining.insert(0, rest)
                elif axis.hint == self.hint(missing) and not equal(axis.size, missing, self):
                    raise DoesNotFitError
                group.append(axis)
            groups.append(tuple(group))
        if remaining:
            raise DoesNotFitError
        return tuple(groups)

    def unify(self, first: Index, second: Index) -> None:
        """Make two indices the same by tying free axes and splitting. Raises DoesNotFitError."""
        if len(first) != len(second):
            raise DoesNotFitError
        for left, right in zip(first, second, strict=True):
            self._unify(list(self.resolve(left)), list(self.resolve(right)))

    def _unify(self, left: list[Axis], right: list[Axis]) -> None:
        while left and right:
            one, other = left.pop(0), right.pop(0)
            if one is other:
                continue
            if one.hint == other.hint:
                if not equal(one.size, other.size, self):
                    raise DoesNotFitError
                self.tie(one, other)
            elif one.hint % other.hint == 0:
                outer, rest = self.split(one, other.size)
                self.tie(outer, other)
                left.insert(0, rest)
            elif other.hint % one.hint == 0:
                outer, rest = self.split(other, one.size)
                self.tie(outer, one)
                right.insert(0, rest)
            else:
                raise DoesNotFitError
        if left or right:
            raise DoesNotFitError

    def tie(self, one: Axis, other: Axis) -> None:
        if isinstance(one, ChosenAxis) or isinstance(other, ChosenAxis):
            raise DoesNotFitError  # a position that is computed is no loop
        if one in self.free:
            self.bound[one] = (other,)
            self.free.discard(one)
        elif other in self.free:
            self.bound[other] = (one,)
            self.free.discard(other)
        else:
            raise DoesNotFitError


def product(axes: Sequence[Axis]) -> sympy.Expr:
    return sympy.prod([axis.size for axis in axes]) if axes else sympy.Integer(1)


def quotient(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    """Return ``size / by``, which is known to be whole, as are the divisions in both."""
    ratio = sympy.simplify(without_floors(size) / without_floors(by))
    numerator, denominator = ratio.as_numer_denom()
    return ratio if denominator == 1 else numerator // denominator


def equal(one: sympy.Expr, other: sympy.Expr, binding: Binding) -> bool:
    """Return whether two sizes are equal for every size of the inputs, floors taken as exact: a
    function that regroups a dimension has required that its size be a multiple."""
    if binding.hint(one) != binding.hint(other):
        return False
    return bool(one == other or sympy.simplify(without_floors(one) - without_floors(other)) == 0)


def without_floors(size: sympy.Expr) -> sympy.Expr:
    """Return the size with floor divisions as divisions."""
    return size.replace(
        lambda part: getattr(part.func, "__name__", "") in ("FloorDiv", "floor"),
        lambda part: part.args[0] / part.args[1] if len(part.args) == 2 else part.args[0],
    )


@dataclass(frozen=True)
class Member:
    """A node that a kernel computes: its index, and the axes over which a reduction goes."""

    node: Node
    index: Index


@dataclass(frozen=True)
class Kernel:
    """Rows, columns, and the nodes computed over them; ``binding`` holds for all indices."""

    members: tuple[Member, ...]
    row_axes: tuple[Axis, ...]
    column_axes: tuple[Axis, ...]
    bound: Mapping[Axis, tuple[Axis, ...]]
    values: Mapping[Node, Expression] = field(default_factory=dict)
    names: Mapping[Expression, str] = field(default_factory=dict)
    users_names: frozenset[Expression] = frozenset()

    @property
    def has_columns(self) -> bool:
        return bool(self.column_axes) or any(
            isinstance(member.node, (Reduction, Scan)) for member in self.members
        )

    def computes(self, node: Node) -> bool:
        return any(member.node is node for member in self.members)

    def loads(self) -> list[Load]:
        return [found for found in walk([*self.values.values()]) if isinstance(found, Load)]


class Evaluation:
    """Computes the expressions of nodes over a kernel's axes."""

    def __init__(
        self,
        binding: Binding,
        members: Sequence[Member],
        stored: frozenset[Node],
        apart: Container[Node] = (),
    ):
        self.binding = binding
        self.members = {member.node: member for member in members}
        self.stored = stored  # nodes that other kernels or PyTorch compute
        self.apart = apart  # nodes that are read at other places than their own from memory alone
        self.known: dict[tuple[Node, Index], Expression] = {}
        self.names: dict[Expression, str] = {}
        self.users_names: set[Expression] = set()

    def at(self, node: Node, index: Index) -> Expression:
        """Return the value of ``node`` at ``index``."""
        key = node, self.binding.resolved(index)
        if key not in self.known:
            value = self.known[key] = self._at(node, index)
            if node.is_named or value not in self.users_names:
                self.names[value] = node.name
            if node.is_named:
                self.users_names.add(value)
        return self.known[key]

    def _at(self, node: Node, index: Index) -> Expression:
        if node in self.stored and node not in self.members:
            return self._loaded(node, index)
        if node in self.apart and node in self.members:
            self.binding.unify(index, self.members[node].index)
        if isinstance(node, (Window, Regrouped)):
            return self._loaded(node, index)
        if isinstance(node, Piece):
            return self.at(node.value, index)
        if isinstance(node, View):
            return self.at(node.source, node.index(index, node.source.sizes, self.binding))
        if isinstance(node, Pointwise):
            operands = tuple(
                self.at(operand, unexpanded(index, operand.sizes))
                if isinstance(operand, Node)
                else operand
                for operand in node.operands
            )
            second = operands[1] if len(operands) > 1 else None
            is_one = isinstance(second, Constant) and second.value == 1
            if node.function == "same" or (is_one and node.function in ("mul", "div")):
                return in_kind(operands[0], node.kind)
            if node.function == "where" and isinstance(operands[0], Constant):
                return in_kind(operands[1 if operands[0].value else 2], node.kind)
            if node.kind == "bool":
                return condition(node.function, operands)
            return Apply(node.function, operands, node.kind)
        if isinstance(node, Choice):
            return self.at(node.source, self._chosen(node, index))
        if isinstance(node, Along):
            return position(index[node.dim])
        if isinstance(node, Reduction):
            member = self.members.get(node)
            if member is None:
                raise DoesNotFitError  # another kernel's, which does not store it
            kept, at = _kept(node, index), _kept(node, member.index)
            self.binding.unify(at, kept)
            return Reduced(node.function, self.at(node.source, _full(node, member)), node.kind)
        if isinstance(node, Scan):
            member = self.members.get(node)
            if member is None:
                raise DoesNotFitError  # another kernel's, which does not store it
            self.binding.unify(member.index, index)
            return Scanned(node.function, self.at(node.source, member.index), node.kind)
        return _load(node, index)

    def _chosen(self, node: Choice, index: Index) -> Index:
        """Return the index of the source's element that a choice is at ``index``."""
        found: list[tuple[Axis, ...]] = []
        for size, place, kept in zip(node.source.sizes, node.places, node.kept, strict=True):
            if place is None:
                assert kept is not None
                found.append(() if size == 1 else index[kept])
            else:
                value = self.at(place, unexpanded(index, place.sizes))
                found.append((chosen_axis(size, self.binding.hint(size), value),))
        return tuple(found)

    def _loaded(self, tensor: Node, index: Index) -> Load:
        """Return a load of what another kernel has written, never this one."""
        memory = memory_of(tensor)
        is_part = memory is not tensor or isinstance(memory, Pieces)
        if is_part and any(leaf in self.members for leaf in leaves(memory)):
            raise DoesNotFitError
        if isinstance(memory, Call) and any(one in self.members for one in ancestors(memory)):
            raise DoesNotFitError  # the call runs behind this kernel
        return _load(tensor, index)


def _load(tensor: Node, index: Index) -> Load:
    """Return a load. A dimension of which a part is computed is computed as a whole."""
    entries = [
        (chosen_axis(product(entry), math.prod(axis.hint for axis in entry), position(entry)),)
        if len(entry) > 1 and any(isinstance(axis, ChosenAxis) for axis in entry)
        else entry
        for entry in index
    ]
    return Load(tensor, tuple(entries))


def _kept(node: Reduction, index: Index) -> Index:
    """Return the index's entries for the dimensions that the reduction keeps."""
    if not node.keepdim:
        return index[: len(node.kept)]
    return tuple(index[dim] for dim in node.kept)


def _full(node: Reduction, member: Member) -> Index:
    """Return the source's index, from a reduction member's: its kept entries, then the reduced."""
    kept = dict(zip(node.kept, _kept(node, member.index), strict=True))
    reduced = dict(zip(node.dims, member.index[len(node.sizes) :], strict=True))
    return tuple({**kept, **reduced}[dim] for dim in range(len(node.source.sizes)))


class Scheduler:
    """Puts nodes into kernels, one after the other, each with what it shares most bytes with."""

    def __init__(self, hints: Mapping[sympy.Symbol, int], apart: Container[Node] = ()):
        self.hints = hints
        self.apart = apart
        self.kernels: list[Kernel] = []
        self.needs: list[set[int]] = []  # of each kernel, the kernels that it reads from

    def add(self, node: Node, stored: frozenset[Node]) -> None:
        """Put a node into the best kernel that it fits in, or a new one."""
        if isinstance(node, Reduction) and self._take_over(node, stored):
            return
        sources = {place for place, one in enumerate(self.kernels) if self._reads(node, one)}
        for place in reversed(range(len(self.kernels))):
            if any(self._reaches(other, place) for other in sources - {place}):
                continue  # the node needs a kernel that needs this one
            joined = self.joined(self.kernels[place], node, stored)
            if joined is not None:
                self.kernels[place] = joined
                self.needs[place] |= sources - {place}
                return
        alone = Kernel((), (), (), {})
        fresh = self.joined(alone, node, stored)
        if fresh is None:
            line = f" ({node.line})" if node.line else ""
            raise EjectError(
                f"{node.name} is computed from tensors whose dimensions are split in different "
                f"ways{line}; eject the parts before and after it."
            )
        self.kernels.append(fresh)
        self.needs.append(sources)

    def is_too_deep(self, node: Reduction, stored: frozenset[Node]) -> bool:
        """Return whether a reduction needs more loops over columns than a kernel has, however its
        operands lie: the positions along an axis need a loop of their own."""
        if node.source in stored or isinstance(node.source, (Input, Pieces)):
            return False
        if not any(isinstance(one, (Along, Choice)) for one in ancestors(node)):
            return False
        alone = self.joined(Kernel((), (), (), {}), node, stored)
        if alone is None:
            return False
        found = [one for one in walk([*alone.values.values()]) if isinstance(one, Position)]
        places = {axis: one for one in found for axis in one.axes}
        loops = [places.get(axis) for axis in alone.column_axes if axis.size != 1]
        return sum(1 for _ in itertools.groupby(loops)) > COLUMN_LOOPS

    def _take_over(self, node: Reduction, stored: frozenset[Node]) -> bool:
        """Put a reduction along the innermost dimensions, and all that a kernel without reductions
        computes for it or from the same elements, into one kernel in that one's place; return
        whether they fit.

        The reduction has the rows that the results have, so that no program loses work. Its kernel
        reads what the other one reads, and not the results.
        """
        rank = len(node.source.sizes)
        if not node.kept or node.dims != tuple(range(rank - len(node.dims), rank)):
            return False
        sources = [place for place, one in enumerate(self.kernels) if self._reads(node, one)]
        beside = [place for place in self._beside(node, stored) if place not in sources]
        for place in (*reversed(sources), *reversed(beside)):
            kernel = self.kernels[place]
            others = set(sources) - {place}
            if kernel.has_columns or any(self._reaches(other, place) for other in others):
                continue
            computed = [member.node for member in kernel.members]
            rest = stored - set(computed)
            joined = self.joined(Kernel((), (), (), {}), node, rest)
            for member in computed:
                joined = joined and self.joined(joined, member, rest)
            if joined is not None:
                self.kernels[place] = joined
                self.needs[place] |= others
                return True
        return False

    def _beside(self, node: Reduction, stored: frozenset[Node]) -> list[int]:
        """Return the kernels that read an element of a tensor wherever the reduction reads one."""
        alone = self.joined(Kernel((), (), (), {}), node, stored)
        if alone is None:
            return []
        read = {load.tensor for load in _whole(alone.loads(), alone)}
        return [
            place
            for place, one in enumerate(self.kernels)
            if any(load.tensor in read for load in _whole(one.loads(), one))
        ]

    def _reads(self, node: Node, kernel: Kernel) -> bool:
        return any(kernel.computes(found) for found in ancestors(node))

    def _reaches(self, start: int, goal: int) -> bool:
        """Return whether a kernel reads from another one, directly or not."""
        seen: set[int] = set()
        stack = list(self.needs[start])
        while stack:
            place = stack.pop()
            if place not in seen:
                seen.add(place)
                stack += self.needs[place]
        return goal in seen

    def joined(self, kernel: Kernel, node: Node, stored: frozenset[Node]) -> Kernel | None:
        """Return the kernel with ``node``, or None if the node does not fit."""
        try:
            return self._joined(kernel, node, stored)
        except DoesNotFitError:
            return None

    def _joined(self, kernel: Kernel, node: Node, stored: frozenset[Node]) -> Kernel:
        binding = Binding(self.hints, kernel.bound)
        index = tuple(binding.fresh(size) for size in node.sizes)
        if isinstance(node, Reduction):
            index += tuple(binding.fresh(node.source.sizes[dim]) for dim in node.dims)
        member = Member(node, index)
        members = (*kernel.members, member)
        evaluation = Evaluation(binding, members, stored, self.apart)
        wanted = self._value(evaluation, member)
        if not kernel.members:
            rows = index[: len(node.sizes)]
            columns = index[len(node.sizes) :]
            if isinstance(node, Scan):
                rows, columns = (*rows[: node.dim], *rows[node.dim + 1 :]), (rows[node.dim],)
            joined = Kernel(members, _flat(rows), _flat(columns), binding.bound)
            return self._evaluated(joined, stored)
        self._tie_by_loads(binding, wanted, kernel)
        self._tie_by_size(binding, kernel, member)
        joined = replace(
            kernel,
            members=members,
            row_axes=binding.resolve(kernel.row_axes),
            column_axes=binding.resolve(kernel.column_axes),
            bound=binding.bound,
        )
        self._check(joined, member, binding)
        return self._evaluated(joined, stored)

    def _value(self, evaluation: Evaluation, member: Member) -> Expression:
        return evaluation.at(member.node, member.index[: len(member.node.sizes)])

    def _tie_by_loads(self, binding: Binding, wanted: Expression, kernel: Kernel) -> None:
        """Tie the axes left free such that the node reads what the kernel reads."""
        loads = {load.tensor: load for load in kernel.loads()}
        for load in walk([wanted]):
            if isinstance(load, Load) and load.tensor in loads:
                attempt = Binding(self.hints, binding.bound)
                attempt.free = set(binding.free)
                try:
                    attempt.unify(load.index, loads[load.tensor].index)
                except DoesNotFitError:
                    continue
                binding.bound, binding.free = attempt.bound, attempt.free

    def _tie_by_size(self, binding: Binding, kernel: Kernel, member: Member) -> None:
        """Tie the axes still free to those of the kernel that the member does not have yet."""
        taken = set(binding.resolve(_flat(member.index)))
        open_axes = [
            axis
            for axis in binding.resolve((*kernel.row_axes, *kernel.column_axes))
            if axis not in taken
        ]
        for axis in sorted(binding.free, key=lambda axis: axis.serial):
            if axis in binding.bound or axis in open_axes:
                continue
            match = next((one for one in open_axes if equal(one.size, axis.size, binding)), None)
            if match is None:
                raise DoesNotFitError
            open_axes.remove(match)
            binding.tie(axis, match)

    def _check(self, kernel: Kernel, member: Member, binding: Binding) -> None:
        """Raise DoesNotFitError unless the member belongs to each element or to each row."""
        rows, columns = set(kernel.row_axes), set(kernel.column_axes)
        rank = len(member.node.sizes)
        own = binding.resolve(_flat(member.index[:rank]))
        reduced = binding.resolve(_flat(member.index[rank:]))
        if len(set(own)) != len(own) or len(set(reduced)) != len(reduced):
            raise DoesNotFitError
        if isinstance(member.node, Scan):
            along = binding.resolve(member.index[member.node.dim])
            fits = set(own) == rows | columns and along == kernel.column_axes
        elif isinstance(member.node, Reduction):
            fits = set(own) == rows and set(reduced) == columns
        else:
            fits = set(own) == rows | columns or (bool(columns) and set(own) == rows)
        if not fits:
            raise DoesNotFitError

    def _evaluated(self, kernel: Kernel, stored: frozenset[Node]) -> Kernel:
        """Return the kernel with the values of its members, under its final binding."""
        binding = Binding(self.hints, kernel.bound)
        members = tuple(replace(one, index=binding.resolved(one.index)) for one in kernel.members)
        evaluation = Evaluation(binding, members, stored, self.apart)
        values = {member.node: self._value(evaluation, member) for member in members}
        return replace(
            kernel,
            members=members,
            row_axes=binding.resolve(kernel.row_axes),
            column_axes=binding.resolve(kernel.column_axes),
            values=values,
            bound=binding.bound,
            names=evaluation.names,
            users_names=frozenset(evaluation.users_names),
        )


def _whole(loads: Sequence[Load], kernel: Kernel) -> list[Load]:
    """Return the loads that have an element for each row and column of the kernel."""
    axes = {*kernel.row_axes, *kernel.column_axes}
    return [load for load in loads if set(_flat(load.index)) == axes]


def _flat(index: Index) -> tuple[Axis, ...]:
    return tuple(axis for axes in index for axis in axes)


def ancestors(node: Node, stored: Container[Node] = ()) -> Iterator[Node]:
    """Yield the nodes that ``node`` is computed from, and itself, up to those that are stored."""
    seen: set[Node] = set()
    stack = [node]
    while stack:
        one = stack.pop()
        if one not in seen:
            seen.add(one)
            yield one
            stack += () if one in stored else operands_of(one)


def in_order(results: Sequence[Node]) -> list[Node]:
    """Return all nodes that the results need, each after those that it is computed from."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in order:
            for operand in operands_of(node):
                visit(operand)
            order[node] = None

    for result in results:
        visit(result)
    return list(order)


def schedule(
    results: Sequence[Node], hints: Mapping[sympy.Symbol, int], apart: Sequence[Node] = ()
) -> list[Kernel]:
    """Return the kernels that compute ``results``, in an order in which they can run.

    Results and reductions are computed once each. Everything else is computed where it is read, but
    for what a reduction with too many loops goes over, and what is given as ``apart``: a kernel
    that reads such a node at other places than its own reads what another one has stored.
    """
    results = [*results, *apart]
    order = in_order(results)
    whole: set[Node] = {node for node in results if isinstance(node, Pieces)}
    wanted = {node for node in results if not isinstance(node, (Pieces, Constant))}
    for node in order:
        if isinstance(node, Window) and not isinstance(memory_of(node), Input):
            memory = memory_of(node)
            (whole if isinstance(memory, Pieces) else wanted).add(memory)
        if not isinstance(node, Piece):
            whole.update(one for one in operands_of(node) if isinstance(one, Pieces))
        if isinstance(node, Call):
            for operand in map(memory_of, operands_of(node)):
                (whole if isinstance(operand, Pieces) else wanted).add(operand)
    wanted |= {leaf for node in whole for leaf in leaves(node) if constant_of(leaf) is None}
    wanted = {node for node in wanted if not isinstance(node, (Input, Call))}
    scheduler = Scheduler(hints, frozenset(apart))
    stored: set[Node] = set()
    for node in order:
        if isinstance(node, Reduction) and scheduler.is_too_deep(node, frozenset(stored)):
            scheduler.add(node.source, frozenset(stored))
            stored.add(node.source)
        if isinstance(node, (Reduction, Scan)) or node in wanted:
            scheduler.add(node, frozenset(stored))
        if isinstance(node, (Reduction, Scan, Call)) or node in wanted or node in whole:
            stored.add(node)
    return scheduler.kernels
