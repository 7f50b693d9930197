"""Slices of tensors, and tensors that are put together from parts.

A kernel's index is made of whole axes, so it cannot begin in the middle of a dimension. A slice of
a tensor in memory is therefore a tensor of its own, a view that the launcher makes (``Window``). A
slice of a computed tensor is computed from slices of what it is computed from. A tensor that is
put together (``Pieces``) is computed part by part, and each part is stored into a view of the
whole. The zeros around the gradient of a slice are such a part.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy

from fuselab.ejection.exact_sizes import exact_divisions, exact_size, in_example
from fuselab.ejection.loops import (
    Along,
    Axis,
    Choice,
    Constant,
    Index,
    Input,
    Node,
    Piece,
    Pieces,
    Pointwise,
    Reduction,
    Regrouped,
    Scan,
    Size,
    Splitter,
    View,
    Window,
)
from fuselab.ejection.stored import constant_of, folded

ZERO, ONE = sympy.Integer(0), sympy.Integer(1)
MOST_PARTS = 32  # kernels for more would be slower than one that copies
MOST_REDUCED = 8  # parts that a kernel reduces together
_OF_TWO = {"sum": "add", "prod": "mul", "amax": "maximum", "amin": "minimum"}
Region = tuple[sympy.Expr, int, sympy.Expr]  # start, step, length


def unexpanded(index: Index, sizes: Sequence[sympy.Expr]) -> Index:
    """Return the index into a tensor of ``sizes`` that broadcasting gives it, aligned at the end:
    position 0 where it has size 1."""
    tail = index[len(index) - len(sizes) :]
    return tuple(() if size == 1 else axes for axes, size in zip(tail, sizes, strict=True))


class _Unsplit:
    """A splitter that only follows whole dimensions."""

    def regroup(self, axes: Sequence[Axis], sizes: Sequence[sympy.Expr]) -> Index:
        """Return the axes in groups of ``sizes``; where a group ends within an axis, or takes
        several, a group of axes that stand for none."""
        remaining = [axis for axis in axes if axis.size != 1]
        groups: list[tuple[Axis, ...]] = []
        for size in sizes:
            if remaining and remaining[0].size == size:
                groups.append((remaining.pop(0),))
            elif size == 1:
                groups.append(())
            else:
                # the rest is matched from the end
                break
        behind: list[tuple[Axis, ...]] = []
        for size in reversed(sizes[len(groups) :]):
            if remaining and remaining[-1].size == size:
                behind.insert(0, (remaining.pop(),))
            elif size == 1:
                behind.insert(0, ())
            else:
                break
        middle = len(sizes) - len(groups) - len(behind)
        unknown = Axis(ONE, 1)
        return (*groups, *[(unknown, *remaining)] * middle, *behind)


class Parts:
    """Cuts nodes, puts them together, and moves arithmetic into the parts."""

    def __init__(self, hints: Mapping[sympy.Symbol, int]) -> None:
        self.hints = hints
        self.slices: dict[Any, Node] = {}
        # Sizes that must not be negative: what is decided here by the example holds where they
        # are not.
        self.conditions: dict[sympy.Expr, None] = {}
        # What whole divisions that are taken as exact divide, each with the number it divides by.
        self.divisions: set[tuple[sympy.Expr, sympy.Expr]] = set()

    def require(self, size: sympy.Expr) -> None:
        """Note that the package holds where ``size`` is not negative."""
        size = self.exact(size)
        if not size.is_number:
            self.conditions[size] = None

    def hint(self, size: sympy.Expr) -> int:
        return in_example(size, self.hints)

    def exact(self, size: sympy.Expr) -> sympy.Expr:
        """Return a size with its divisions taken as exact, which the package then requires."""
        exact = exact_size(size, self.hints)
        if exact != size:
            self.divisions.update(exact_divisions(size, self.hints))
        return exact

    # --- slices

    def cut(self, source: Node, dim: int, start: Any, length: sympy.Expr, step: int) -> Node:
        """Return the slice of ``length`` elements of ``source`` along ``dim``."""
        start = sympy.sympify(start)
        if source.sizes[dim] == length and step == 1:
            return source
        key = source, dim, start, length, step
        found = self.slices.get(key)
        if found is None:
            self.require(start)
            self.require(length)
            if step == 1:
                self.require(source.sizes[dim] - start - length)
            found = self.slices[key] = self._cut(source, dim, start, length, step)
        return found

    def _cut(
        self, source: Node, dim: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Node:
        sizes = _with(source.sizes, dim, length)
        if isinstance(source, Pointwise):
            operands = tuple(
                self.cut_operand(operand, len(source.sizes) - dim, start, length, step)
                for operand in source.operands
            )
            return self.pointwise(replace(source, sizes=sizes, operands=operands))
        if isinstance(source, View):
            found = self._cut_view(source, dim, start, length, step)
            if found is not None:
                return found
        if isinstance(source, Choice):
            return self._cut_choice(source, dim, start, length, step)
        if isinstance(source, Along):
            if dim != source.dim:
                return replace(source, sizes=sizes)
            position: Node = replace(source, sizes=sizes)
            for function, number in (("mul", Constant(step)), ("add", _number(start))):
                position = Pointwise(
                    source.name, sizes, "int", function=function, operands=(position, number)
                )
            return position
        if isinstance(source, Reduction):
            along = source.kept[dim] if not source.keepdim else dim
            part = self.cut(source.source, along, start, length, step)
            return self.reduction(replace(source, sizes=sizes, source=part))
        if isinstance(source, Scan) and dim != source.dim:
            part = self.cut(source.source, dim, start, length, step)
            return replace(source, sizes=sizes, source=part)
        if isinstance(source, Pieces):
            cut = self._cut_pieces(source, dim, start, length, step)
            if cut is not None:
                return cut
        if isinstance(source, Window) and dim <= source.dim:
            return self._cut_window(source, dim, start, length, step)
        return Window(source.name, sizes, source.kind, source.line, source=source, dim=dim,
                      start=start, step=step)  # fmt: skip

    def _cut_window(
        self, window: Window, dim: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Node:
        """Return a slice of a slice of a tensor as slices of the tensor, the one along its first
        dimension innermost, so that the same elements are the same node."""
        if dim == window.dim:
            first = self.exact(window.start + window.step * start)
            return self.cut(window.source, dim, first, length, window.step * step)
        part = self.cut(window.source, dim, start, length, step)
        return self.cut(part, window.dim, window.start, window.sizes[window.dim], window.step)

    def _cut_choice(
        self, choice: Choice, dim: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Node:
        from_end = len(choice.sizes) - dim
        places = tuple(
            self.cut_operand(place, from_end, start, length, step) for place in choice.places
        )
        source = choice.source
        for of_source, kept in enumerate(choice.kept):
            if kept == dim and choice.places[of_source] is None and source.sizes[of_source] != 1:
                source = self.cut(source, of_source, start, length, step)
        sizes = _with(choice.sizes, dim, length)
        return replace(choice, sizes=sizes, source=source, places=places)

    def _cut_view(
        self, view: View, dim: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Node | None:
        sizes = _with(view.sizes, dim, length)
        place = self.place_of(view, dim)
        if place == ():
            return replace(view, sizes=sizes)
        if place is not None:
            part = self.cut(view.source, place[0], start, length, step)
            return self.view(replace(view, sizes=sizes, source=part))
        same, inner, outer = _difference(view.sizes, view.source.sizes)
        if len(outer) == 1 and same <= dim < same + len(inner):  # one dimension becomes several
            behind = sympy.prod(inner[dim - same + 1 :])
            if dim == same and step == 1:
                part = self.cut(
                    view.source, same, self.exact(start * behind), self.exact(length * behind), 1
                )
                return self.view(replace(view, sizes=sizes, source=part))
            if length == 1 and behind == 1 and view.sizes[dim].is_number:
                count = self.exact(sympy.prod(inner[:-1]))
                part = self.cut(view.source, same, start, count, int(view.sizes[dim]))
                return self.view(replace(view, sizes=sizes, source=part))
        if not isinstance(view.source, Input):
            return None
        whole = Regrouped(view.name, view.sizes, view.kind, source=view.source)
        return Window(view.name, sizes, view.kind, "", False, whole, dim, start, step)

    def cut_operand(
        self, operand: Any, from_end: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Any:
        """Cut an operand that broadcasts, aligned at its last dimension."""
        if not isinstance(operand, Node) or from_end > len(operand.sizes):
            return operand
        dim = len(operand.sizes) - from_end
        return operand if operand.sizes[dim] == 1 else self.cut(operand, dim, start, length, step)

    def place_of(self, view: View, dim: int) -> tuple[int, ...] | None:
        """Return the dimension of the source that a dimension of the view is, none if the view
        expands it, and None if it is split or joined with others."""
        axes = [Axis(size, self.hint(size)) for size in view.sizes]
        index = view.index(tuple((axis,) for axis in axes), view.source.sizes, _Unsplit())
        places = [place for place, entry in enumerate(index) if axes[dim] in entry]
        unknown = any(one not in axes for entry in index for one in entry)
        if not places:
            return None if unknown or view.sizes[dim] == 1 else ()
        if index[places[0]] != (axes[dim],) or len(places) > 1:
            return None
        return (places[0],)

    def varies(self, node: Node | Constant | Size, dim: int) -> bool:
        """Return whether elements may differ along a dimension; True where that is not seen."""
        if not isinstance(node, Node) or dim < 0 or node.sizes[dim] == 1:
            return False
        if isinstance(node, Pointwise):
            rank = len(node.sizes)
            return any(
                isinstance(one, Node) and self.varies(one, dim - rank + len(one.sizes))
                for one in node.operands
            )
        if isinstance(node, View):
            place = self.place_of(node, dim)
            return place is None or any(self.varies(node.source, one) for one in place)
        if isinstance(node, Along):
            return node.dim == dim
        return True

    def _cut_pieces(
        self, source: Pieces, dim: int, start: sympy.Expr, length: sympy.Expr, step: int
    ) -> Node | None:
        """Return a slice of what is put together, if its ends are ends of parts or in one part."""
        if dim != source.dim:
            values = [
                (self.cut(one.value, dim, start, length, step), one.start, one.step)
                for one in source.parts
            ]
            return self._made(source, _with(source.sizes, dim, length), source.dim, values)
        for one in source.parts:
            size = one.sizes[dim]
            if (one.start, one.step, size) == (start, step, length):
                return one.value
            first, last = self.hint(start), self.hint(start) + step * (self.hint(length) - 1)
            begin = self.hint(one.start)
            if one.step == 1 and begin <= first and last < begin + self.hint(size):
                behind = self.exact(one.start + size - start - step * (length - 1) - 1)
                if self.hint(length) == 0 and not behind.is_number:
                    continue  # nothing in the example, and elsewhere not in this part
                self.require(start - one.start)
                self.require(behind)
                return self.cut(one.value, dim, self.exact(start - one.start), length, step)
        if step != 1 or any(one.step != 1 for one in source.parts):
            return None
        found = []
        first, last = self.hint(start), self.hint(start) + self.hint(length)
        for one in source.parts:
            begin = self.hint(one.start)
            end = begin + self.hint(one.sizes[dim])
            if end <= first or begin >= last:
                continue
            value = one.value
            self.require(start + length - one.start)
            self.require(one.start + one.sizes[dim] - start)
            if begin < first:
                cut_off = self.exact(start - one.start)
                value = self.cut(value, dim, cut_off, self.exact(value.sizes[dim] - cut_off), 1)
            if end > last:
                kept = self.exact(start + length - (start if begin < first else one.start))
                value = self.cut(value, dim, ZERO, kept, 1)
            found.append(value)
        if sum(self.hint(one.sizes[dim]) for one in found) != self.hint(length):
            return None
        common = {"name": source.name, "sizes": _with(source.sizes, dim, length),
                  "kind": source.kind, "line": source.line}  # fmt: skip
        return self.joined(common, dim, found)

    # --- what is put together

    def joined(self, common: Mapping[str, Any], dim: int, sources: Sequence[Node]) -> Node:
        """Return the concatenation along ``dim``."""
        parts: list[tuple[Node, sympy.Expr, int]] = []
        start: sympy.Expr = ZERO
        for source in sources:
            if source.sizes[dim] == 0:
                continue
            inner = source.parts if isinstance(source, Pieces) and source.dim == dim else ()
            if inner and all(one.step == 1 for one in inner):
                parts += [(one.value, self.exact(start + one.start), 1) for one in inner]
            else:
                parts.append((source, start, 1))
            start = self.exact(start + source.sizes[dim])
        return self._pieces(common, dim, parts)

    def placed(
        self,
        common: Mapping[str, Any],
        dim: int,
        start: sympy.Expr,
        step: int,
        part: Node,
        around: Node,
    ) -> Node:
        """Return ``around`` with a slice replaced by ``part``."""
        whole, length = common["sizes"][dim], part.sizes[dim]
        if length == whole and step == 1:
            return part
        parts = [(part, start, step)]
        if step == 1:
            end = self.exact(start + length)
            for begin, size in ((ZERO, start), (end, self.exact(whole - end))):
                if size != 0:
                    parts.append((self.cut(around, dim, begin, size, 1), begin, 1))
            parts.sort(key=lambda one: self.hint(one[1]))
            return self._pieces(common, dim, parts)
        offset = self.hint(start)
        covered = -(-(self.hint(whole) - offset) // step)
        if offset >= step or covered != self.hint(length):
            return self._interrupted(common, dim, start, step, part, around)
        for other in range(step):
            if other != offset:
                size = self.exact(_ceil_div(whole - other, step, length))
                region = sympy.Integer(other)
                parts.append((self.cut(around, dim, region, size, step), region, step))
        parts.sort(key=lambda one: self.hint(one[1]))
        return self._pieces(common, dim, parts)

    def _interrupted(
        self,
        common: Mapping[str, Any],
        dim: int,
        start: sympy.Expr,
        step: int,
        part: Node,
        around: Node,
    ) -> Node:
        """Return ``around`` with a slice with steps replaced that ends before the tensor does."""
        whole = common["sizes"][dim]
        length = self.exact(step * (part.sizes[dim] - 1) + 1)
        sizes = {**common, "sizes": _with(common["sizes"], dim, length)}
        inner = self.placed(sizes, dim, ZERO, step, part, self.cut(around, dim, start, length, 1))
        end = self.exact(start + length)
        sources = [
            self.cut(around, dim, begin, size, 1)
            for begin, size in ((ZERO, start), (end, self.exact(whole - end)))
        ]
        return self.joined(common, dim, [sources[0], inner, sources[1]])

    def _pieces(
        self, common: Mapping[str, Any], dim: int, parts: Sequence[tuple[Node, sympy.Expr, int]]
    ) -> Node:
        if len(parts) == 1:
            return parts[0][0]
        kind = common["kind"]
        for value, start, _ in parts:
            self.require(value.sizes[dim])
            self.require(start)
        held = tuple(
            Piece(value.name, value.sizes, kind, value.line, False, _own(value), start, step)
            for value, start, step in parts
        )
        fields = {key: common[key] for key in ("name", "sizes", "kind", "line") if key in common}
        return Pieces(**fields, dim=dim, parts=held)

    def _made(
        self,
        like: Node,
        sizes: Sequence[sympy.Expr],
        dim: int,
        parts: Sequence[tuple[Node, sympy.Expr, int]],
    ) -> Node:
        common = {"name": like.name, "sizes": tuple(sizes), "kind": like.kind, "line": like.line}
        return self._pieces(common, dim, parts)

    # --- arithmetic on parts

    def pointwise(self, node: Pointwise) -> Node:
        """Return the function part by part, if an operand is put together, and a number where all
        operands are the same number everywhere."""
        number = folded(node)
        if number is not None:
            return replace(node, function="same", operands=(number,))
        rank = len(node.sizes)
        for operand in node.operands:
            if not isinstance(operand, Pieces) or len(operand.parts) > MOST_PARTS:
                continue
            dim = rank - len(operand.sizes) + operand.dim
            regions = self._common_regions(node, rank - dim)
            if regions is None:
                continue
            parts = []
            for start, step, length in regions:
                operands = tuple(
                    self.cut_operand(one, rank - dim, start, length, step) for one in node.operands
                )
                sizes = _with(node.sizes, dim, length)
                value = self._simplified(replace(node, sizes=sizes, operands=operands))
                parts.append((value, start, step))
            return self._made(node, node.sizes, dim, parts)
        return node

    def _simplified(self, node: Pointwise) -> Node:
        """Return a sum with the zeros around a part as the other operand."""
        if node.function == "add":
            for one, other in (node.operands, reversed(node.operands)):
                if is_zero(one) and isinstance(other, Node) and other.sizes == node.sizes:
                    return other
        return self.pointwise(node)

    def _common_regions(self, node: Pointwise, from_end: int) -> list[Region] | None:
        """Return the parts into which a dimension of the operands, counted from the end, falls."""
        found: list[list[Region]] = []
        for operand in node.operands:
            if isinstance(operand, Pieces) and len(operand.sizes) - operand.dim == from_end:
                dim = operand.dim
                found.append([(one.start, one.step, one.sizes[dim]) for one in operand.parts])
        regions = found[0]
        for others in found[1:]:
            if others == regions:
                continue
            if any(step != 1 for _, step, _ in (*regions, *others)):
                return None
            regions = self._refined(regions, others)
            for _, _, length in regions:
                self.require(length)
            if not regions:
                return None
        return regions if len(regions) <= MOST_PARTS else None

    def _refined(self, one: Sequence[Region], other: Sequence[Region]) -> list[Region]:
        """Return the parts between all starts of either."""
        starts: dict[int, sympy.Expr] = {}
        for start, _, _ in (*one, *other):
            if starts.setdefault(self.hint(start), start) != start:
                return []
        last = one[-1]
        end = self.exact(last[0] + last[2])
        order = [starts[at] for at in sorted(starts)]
        return [
            (start, 1, self.exact(behind - start))
            for start, behind in zip(order, [*order[1:], end], strict=True)
        ]

    def view(self, node: View) -> Node:
        """Return the rearrangement part by part, where the source is put together and its parts
        are still slices."""
        source = node.source
        if not isinstance(source, Pieces):
            return node
        dims = [dim for dim in range(len(node.sizes)) if self.place_of(node, dim) == (source.dim,)]
        if len(dims) != 1:
            return self._merged(node, source)
        (dim,) = dims
        parts = []
        for one in source.parts:
            sizes = _with(node.sizes, dim, one.sizes[source.dim])
            value = self.view(replace(node, sizes=sizes, source=one.value))
            parts.append((value, one.start, one.step))
        return self._made(node, node.sizes, dim, parts)

    def _merged(self, node: View, source: Pieces) -> Node:
        """Return the view part by part where it joins the dimension of the parts with one other:
        parts of size 1 along the inner one are every so many elements."""
        same, inner, outer = _difference(node.sizes, source.sizes)
        if len(inner) != 1 or len(outer) != 2 or node.index is not regrouped:
            return node
        is_inner = source.dim == same + 1
        parts = []
        for one in source.parts:
            length = one.sizes[source.dim]
            count = self.exact(length * outer[0 if is_inner else 1])
            if one.step != 1 or (is_inner and (length != 1 or not outer[1].is_number)):
                return node
            sizes = _with(node.sizes, same, count)
            value = self.view(replace(node, sizes=sizes, source=one.value))
            start, step = (one.start, int(outer[1])) if is_inner else (one.start * outer[1], 1)
            parts.append((value, self.exact(start), step))
        return self._made(node, node.sizes, same, parts)

    def reduction(self, node: Reduction) -> Node:
        """Return the reduction part by part, where the source is put together along a dimension
        that stays, or of parts of one size."""
        source = node.source
        if not isinstance(source, Pieces):
            return node
        if source.dim in node.dims:
            return self._reduced_together(node, source)
        dim = source.dim if node.keepdim else node.kept.index(source.dim)
        parts = []
        for one in source.parts:
            sizes = _with(node.sizes, dim, one.sizes[source.dim])
            value = self.reduction(replace(node, sizes=sizes, source=one.value))
            parts.append((value, one.start, one.step))
        return self._made(node, node.sizes, dim, parts)

    def reduces_together(self, source: Pieces) -> bool:
        """Return whether parts are reduced together along the dimension of the parts."""
        first, *others = source.parts
        is_equal = all(one.sizes == first.sizes for one in others)
        return is_equal and len(source.parts) <= MOST_REDUCED

    def _reduced_together(self, node: Reduction, source: Pieces) -> Node:
        """Return the reduction of parts that have one size as that of what is computed from their
        elements in the same place: the sum of all is the sum of their sums. Other parts have
        columns of their own, and a kernel has one loop for its columns."""
        if not self.reduces_together(source):
            return node
        first, *others = source.parts
        value = first.value
        for one in others:
            function = _OF_TWO[node.function]
            both = Pointwise(source.name, first.sizes, source.kind, source.line, False, function,
                             (value, one.value))  # fmt: skip
            value = self.pointwise(both)
        if node.dims != (source.dim,) or first.sizes[source.dim] != 1:
            return self.reduction(replace(node, source=value))
        if node.keepdim:
            return value
        return self.view(
            View(node.name, node.sizes, node.kind, node.line, node.is_named, value,
                 lambda index, *_: (*index[: source.dim], (), *index[source.dim :]))
        )  # fmt: skip


def _own(value: Node) -> Node:
    """Return a value with pieces of its own, because they are stored where only one whole is."""
    if not isinstance(value, Pieces):
        return value
    parts = tuple(replace(one, value=_own(one.value)) for one in value.parts)
    return replace(value, parts=parts)


def _with(sizes: Sequence[sympy.Expr], dim: int, length: sympy.Expr) -> tuple[sympy.Expr, ...]:
    return (*sizes[:dim], length, *sizes[dim + 1 :])


def _difference(
    sizes: Sequence[sympy.Expr], others: Sequence[sympy.Expr]
) -> tuple[int, Sequence[sympy.Expr], Sequence[sympy.Expr]]:
    """Return how many first sizes are equal, and what stands before those at the end that are."""
    same = 0
    while same < min(len(sizes), len(others)) and sizes[same] == others[same]:
        same += 1
    behind = 0
    while (
        behind < min(len(sizes), len(others)) - same and sizes[-1 - behind] == others[-1 - behind]
    ):
        behind += 1
    return same, sizes[same : len(sizes) - behind], others[same : len(others) - behind]


def regrouped(index: Index, sizes: Sequence[sympy.Expr], splitter: Splitter) -> Index:
    """Return the index into a tensor of ``sizes`` that is read in another shape."""
    return splitter.regroup([axis for axes in index for axis in axes], sizes)


def _number(size: sympy.Expr) -> Constant | Size:
    return Constant(int(size)) if size.is_number else Size(size)


def is_zero(value: Any) -> bool:
    found = constant_of(value) if isinstance(value, Node) else value
    return isinstance(found, Constant) and found.value == 0


def _ceil_div(size: sympy.Expr, by: int, like: sympy.Expr) -> sympy.Expr:
    """Return the quotient rounded up, as PyTorch writes it."""
    if size.is_number:
        return sympy.Integer(-(-int(size) // by))
    from torch.utils._sympy.functions import FloorDiv

    return FloorDiv(size + (by - 1), by)
