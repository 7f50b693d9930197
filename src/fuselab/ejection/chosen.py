"""Operators that read elements at computed positions, and those that add to them.

Reading is a ``Choice``: a kernel computes the position and loads the element there. Positions that
the user gives are kept inside the tensor; where one lies outside, and PyTorch raises an IndexError
or stops the GPU, the element is NaN. Adding to computed positions, as the gradient of an embedding
does, is a PyTorch call between kernels, because several elements can go to one position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import sympy

from fuselab.ejection.calls import source_line
from fuselab.ejection.graph_nodes import FxNode, arguments_of
from fuselab.ejection.loops import Along, Call, Choice, Constant, Node, Size, View
from fuselab.ejection.parts import regrouped
from fuselab.ejection.steps import Steps, number_of
from fuselab.ejection.stored import constant_of

ONE = sympy.Integer(1)
MOST_COPIES = 8  # of an edge; more would be slower than a PyTorch call
# The functions of runtime/scatter.py that add at positions along one dimension and along several.
ADDED, ADDED_AT = "added_along", "added_at"


class ChosenElements(Steps):
    """The lowering of these operators."""

    # --- integers

    def whole(
        self, node: FxNode, label: str, sizes: Sequence[sympy.Expr], function: str, *operands: Any
    ) -> Node:
        """Return a function of integers as a step on the way to ``node``."""
        return self.element(node, label, sizes, "int", function, *operands)

    def along(self, node: FxNode, sizes: Sequence[sympy.Expr], dim: int) -> Node:
        """Return the position along a dimension; all other dimensions have size 1."""
        own = tuple(size if one == dim else ONE for one, size in enumerate(sizes))
        return Along("position", own, "int", source_line(node), False, dim)

    def size_number(self, size: sympy.Expr) -> Constant | Size:
        size = self.exact(size)
        return Constant(int(size)) if size.is_number else Size(size)

    def spread(self, node: FxNode, place: Node, before: int, behind: int) -> Node:
        """Return a tensor with so many dimensions of size 1 before its own and behind them."""
        if not before and not behind:
            return place
        sizes = (ONE,) * before + place.sizes + (ONE,) * behind
        rank = len(place.sizes)
        return self.parts.view(
            View(
                place.name,
                sizes,
                place.kind,
                source_line(node),
                False,
                place,
                lambda index, *_: index[before : before + rank],
            )
        )

    # --- reading

    def choice(
        self,
        node: FxNode,
        sizes: Sequence[sympy.Expr],
        source: Node,
        places: Sequence[Node | None],
        kept: Sequence[int | None],
    ) -> Node:
        """Return the elements of ``source`` at ``places``."""
        line = source_line(node)
        return Choice(
            source.name, tuple(sizes), source.kind, line, False, source, tuple(places), tuple(kept)
        )

    def along_one(self, node: FxNode, source: Node, dim: int, place: Node) -> Node:
        """Return the elements of ``source`` whose position along ``dim`` is ``place``, which is
        inside. ``place`` has the sizes of the result, or 1."""
        sizes = list(source.sizes)
        sizes[dim] = place.sizes[dim]
        places = [place if one == dim else None for one in range(len(sizes))]
        return self.choice(node, sizes, source, places, range(len(sizes)))

    def inside(
        self, node: FxNode, place: Node, size: sympy.Expr, has_negative: bool
    ) -> tuple[Node, Node]:
        """Return the user's position, which counts from the end if it is negative and may be, and
        whether it is inside; 0 is the position of one that is not."""
        sizes = place.sizes
        if has_negative:
            is_negative = self.element(node, "is_negative", sizes, "bool", "lt", place, Constant(0))
            from_end = self.whole(node, "from_end", sizes, "add", place, self.size_number(size))
            place = self.whole(node, place.name, sizes, "where", is_negative, from_end, place)
        is_not_below = self.element(node, "is_inside", sizes, "bool", "ge", place, Constant(0))
        is_below = self.element(
            node, "is_inside", sizes, "bool", "lt", place, self.size_number(size)
        )
        is_inside = self.element(node, "is_inside", sizes, "bool", "and", is_not_below, is_below)
        inside = self.whole(node, place.name, sizes, "where", is_inside, place, Constant(0))
        return inside, is_inside

    def or_nan(self, node: FxNode, chosen: Node, are_inside: Sequence[Node]) -> Node:
        """Return chosen elements, NaN where a position lies outside."""
        if chosen.kind != "float":
            return chosen
        for is_inside in are_inside:
            chosen = self.element(
                node, chosen.name, chosen.sizes, "float", "where",
                is_inside, chosen, Constant(float("nan")),
            )  # fmt: skip
        return chosen

    def op_index_select(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        index: Node = self.known[node.args[2]]
        if not source.sizes:
            return source
        dim = node.args[1] % len(source.sizes)
        if not index.sizes:
            index = self.spread(node, index, 1, 0)
        place = self.spread(node, index, dim, len(source.sizes) - dim - 1)
        place, is_inside = self.inside(node, place, source.sizes[dim], has_negative=False)
        return self.named(
            node, self.or_nan(node, self.along_one(node, source, dim, place), [is_inside])
        )

    def named(self, node: FxNode, result: Node) -> Node:
        """Return the result with the name of ``node``, if the user's code gave it one."""
        common = self.common(node)
        return self.pointwise(node, "same", (result,)) if common["is_named"] else result

    def op_embedding(self, node: FxNode) -> Node:
        weight, index = self.known[node.args[0]], self.known[node.args[1]]
        place = self.spread(node, index, 0, 1)
        place, is_inside = self.inside(node, place, weight.sizes[0], has_negative=False)
        sizes = (*index.sizes, weight.sizes[1])
        rows = self.choice(node, sizes, weight, (place, None), (None, len(sizes) - 1))
        return self.named(node, self.or_nan(node, rows, [is_inside]))

    def op_index(self, node: FxNode) -> Node:
        return self.indexed(node, is_safe=False)

    def op__unsafe_index(self, node: FxNode) -> Node:
        return self.indexed(node, is_safe=True)

    def indexed(self, node: FxNode, is_safe: bool) -> Node:
        """Return ``source[indices]``: the indices broadcast together, and their dimensions take the
        place of the first of them, or come first where others stand between them."""
        source: Node = self.known[node.args[0]]
        sizes = self.sizes_of(node)
        indices = [one and self.known[one] for one in node.args[1]]
        indices += [None] * (len(source.sizes) - len(indices))
        given = [dim for dim, one in enumerate(indices) if one is not None]
        if any(indices[dim].kind != "int" for dim in given):
            self.refuse(node)  # the number of elements would depend on values
        rank = max(len(indices[dim].sizes) for dim in given)
        is_together = given == list(range(given[0], given[-1] + 1))
        first = given[0] if is_together else 0
        places: list[Node | None] = []
        kept: list[int | None] = []
        are_inside: list[Node] = []
        others = [*range(first), *range(first + rank, len(sizes))]
        for dim, index in enumerate(indices):
            if index is None:
                places.append(None)
                kept.append(others.pop(0))
                continue
            place = self.spread(node, index, 0, len(sizes) - first - rank)
            if not is_safe:
                place, is_inside = self.inside(node, place, source.sizes[dim], has_negative=True)
                are_inside.append(is_inside)
            places.append(place)
            kept.append(None)
        return self.named(
            node, self.or_nan(node, self.choice(node, sizes, source, places, kept), are_inside)
        )

    def chosen_along(self, node: FxNode) -> Node:
        """Return ``source.gather(dim, index)``."""
        source, index = self.known[node.args[0]], self.known[node.args[2]]
        dim = node.args[1] % len(source.sizes)
        place, is_inside = self.inside(node, index, source.sizes[dim], has_negative=False)
        places: list[Node | None] = []
        for one, size in enumerate(source.sizes):
            is_whole = index.sizes[one] == size
            other = None if is_whole else self.along(node, index.sizes, one)
            places.append(place if one == dim else other)
        chosen = self.choice(node, index.sizes, source, places, range(len(places)))
        return self.named(node, self.or_nan(node, chosen, [is_inside]))

    def op_flip(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        rank = len(source.sizes)
        inner = node.args[0]
        dims = {dim % rank for dim in node.args[1]}
        if inner.target is node.target and dims == {dim % rank for dim in inner.args[1]}:
            turned_back: Node = self.known[inner.args[0]]
            return turned_back
        places: list[Node | None] = [None] * rank
        for dim in dims:
            position = self.along(node, source.sizes, dim)
            last = self.size_number(source.sizes[dim] - 1)
            places[dim] = self.whole(node, "mirrored", position.sizes, "sub", last, position)
        kept = range(len(places))
        return self.named(node, self.choice(node, source.sizes, source, places, kept))

    def rolled(self, node: FxNode, source: Node, dim: int, shift: Any) -> Node:
        """Return the elements moved ``shift`` places along a dimension, the last ones first."""
        size = source.sizes[dim]
        amount = self.exact(sympy.sympify(shift))
        position = self.along(node, source.sizes, dim)
        is_onward = self.hint(amount) >= 0
        amount = self.exact(amount if is_onward else -amount)
        self.parts.require(amount)
        count = self.size_number(size)
        distance: Any = self.size_number(amount)
        if not (size.is_number and amount.is_number and int(amount) < int(size)):
            # The distance is less than the size: what is left of it after whole turns.
            turns = self.whole(node, "turns", (), "intdiv", distance, count)
            whole = self.whole(node, "turned", (), "mul", turns, count)
            distance = self.whole(node, "distance", (), "sub", distance, whole)
        sizes = position.sizes
        if is_onward:
            place = self.whole(node, "place", sizes, "sub", position, distance)
            is_out = self.element(node, "is_before", sizes, "bool", "lt", place, Constant(0))
            turned = self.whole(node, "turned", sizes, "add", place, count)
        else:
            place = self.whole(node, "place", sizes, "add", position, distance)
            is_out = self.element(node, "is_behind", sizes, "bool", "ge", place, count)
            turned = self.whole(node, "turned", sizes, "sub", place, count)
        place = self.whole(node, "place", sizes, "where", is_out, turned, place)
        return self.along_one(node, source, dim, place)

    def rolled_flat(self, node: FxNode, source: Node, shift: Any) -> Node:
        """Return the elements rolled in their order in memory."""
        line, numel = source_line(node), (sympy.prod(list(source.sizes)),)
        flat = self.parts.view(
            View(source.name, numel, source.kind, line, False, source, regrouped)
        )
        return self.view(node, self.rolled(node, flat, 0, shift), regrouped)

    def op_diagonal(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        sizes = self.sizes_of(node)
        offset, first, second = self.diagonal_of(node, len(source.sizes), node.args[1:])
        position = self.along(node, sizes, len(sizes) - 1)
        places: list[Node | None] = [None] * len(source.sizes)
        for dim, shift in ((first, max(0, -offset)), (second, max(0, offset))):
            places[dim] = self.whole(
                node, "place", position.sizes, "add", position, Constant(shift)
            )
        others = iter(range(len(sizes)))
        kept = [None if dim in (first, second) else next(others) for dim in range(len(places))]
        return self.named(node, self.choice(node, sizes, source, places, kept))

    op_diagonal_copy = op_diagonal

    def diagonal_of(self, node: FxNode, rank: int, given: Sequence[Any]) -> tuple[int, int, int]:
        """Return a diagonal's offset and its two dimensions."""
        rest: list[Any] = [0, 0, 1]
        offset, first, second = list(given) + rest[len(given) :]
        if not isinstance(number_of(offset), int):
            self.refuse(node)
        return int(offset), first % rank, second % rank

    def op_diagonal_backward(self, node: FxNode) -> Node:
        """Return the gradient on the diagonal, and 0 beside it."""
        gradient: Node = self.known[node.args[0]]
        sizes = self.sizes_of(node)
        offset, first, second = self.diagonal_of(node, len(sizes), node.args[2:])
        row, column = self.along(node, sizes, first), self.along(node, sizes, second)
        both = tuple(size if dim in (first, second) else ONE for dim, size in enumerate(sizes))
        shifted = self.whole(node, "shifted", row.sizes, "add", row, Constant(offset))
        is_on = self.element(node, "is_on_diagonal", both, "bool", "eq", shifted, column)
        place = row if offset >= 0 else column
        inside = self.whole(node, "place", both, "where", is_on, place, Constant(0))
        others = [dim for dim in range(len(sizes)) if dim not in (first, second)]
        chosen = self.choice(
            node, sizes, gradient, (*[None] * len(others), inside), (*others, None)
        )
        return self.pointwise(node, "where", (is_on, chosen, Constant(0.0)))

    def op_reflection_pad1d(self, node: FxNode) -> Node:
        """Return the elements around the edges' elements: with last the last position, that of
        place is last - abs(last - abs(place))."""

        def mirrored(place: Node, last: Any) -> Node:
            below = self.whole(node, "distance", place.sizes, "abs", place)
            distance = self.whole(node, "from_end", place.sizes, "sub", last, below)
            distance = self.whole(node, "from_end", place.sizes, "abs", distance)
            return self.whole(node, "place", place.sizes, "sub", last, distance)

        return self.beyond_edges(node, mirrored)

    def op_replication_pad1d(self, node: FxNode) -> Node:
        def nearest(place: Node, last: Any) -> Node:
            place = self.whole(node, "place", place.sizes, "maximum", place, Constant(0))
            return self.whole(node, "place", place.sizes, "minimum", place, last)

        return self.beyond_edges(node, nearest)

    op_reflection_pad2d = op_reflection_pad3d = op_reflection_pad1d
    op_replication_pad2d = op_replication_pad3d = op_replication_pad1d

    def beyond_edges(self, node: FxNode, place_of: Callable[[Node, Any], Node]) -> Node:
        """Return a padded tensor whose elements beyond the edges are those that ``place_of`` gives
        for a position that may be outside, and the last position."""
        source: Node = self.known[node.args[0]]
        sizes, rank = self.sizes_of(node), len(source.sizes)
        places: list[Node | None] = [None] * rank
        for dim, before, behind in self.paddings(node, node.args[1], rank):
            if before or behind:
                position = self.along(node, sizes, dim)
                place = self.whole(node, "place", position.sizes, "sub", position, Constant(before))
                places[dim] = place_of(place, self.size_number(source.sizes[dim] - 1))
        return self.named(node, self.choice(node, sizes, source, places, range(rank)))

    def paddings(
        self, node: FxNode, amounts: Sequence[Any], rank: int
    ) -> list[tuple[int, int, int]]:
        """Return each padded dimension, the last one first, and the elements before and behind."""
        numbers = [number_of(one) for one in amounts]
        if not all(isinstance(one, int) for one in numbers):
            self.refuse(node)
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return [(rank - 1 - place, *pair) for place, pair in enumerate(pairs)]

    def op_reflection_pad1d_backward(self, node: FxNode) -> Node:
        """Return for each element the sum of its gradient and those of its reflections."""
        gradient: Node = self.known[node.args[0]]
        sizes = self.sizes_of(node)
        for dim, before, behind in self.paddings(node, node.args[2], len(sizes)):
            if before < 0 or behind < 0:
                self.refuse(node)
            last = self.exact(sizes[dim] - 1)
            middle = self.parts.cut(gradient, dim, sympy.Integer(before), sizes[dim], 1)
            position = self.along(node, middle.sizes, dim)
            for count, first, edge in (
                (before, sympy.Integer(1), sympy.Integer(before)),
                (behind, last - behind, before + 2 * last),
            ):
                if count:
                    distance = self.whole(
                        node, "distance", position.sizes, "sub",
                        position, self.size_number(first),
                    )  # fmt: skip
                    is_near = self.within_count(node, distance, count)
                    place = self.whole(
                        node, "place", position.sizes, "sub", self.size_number(edge), position
                    )
                    place = self.whole(
                        node, "place", position.sizes, "where", is_near, place, Constant(0)
                    )
                    reflected = self.along_one(node, gradient, dim, place)
                    middle = self.added_where(node, middle, is_near, reflected)
            gradient = middle
        return gradient

    op_reflection_pad2d_backward = op_reflection_pad1d_backward
    op_reflection_pad3d_backward = op_reflection_pad1d_backward

    def within_count(self, node: FxNode, distance: Node, count: int) -> Node:
        """Return whether an integer is one of 0 to ``count - 1``."""
        sizes = distance.sizes
        is_not_before = self.element(node, "is_near", sizes, "bool", "ge", distance, Constant(0))
        is_not_behind = self.element(
            node, "is_near", sizes, "bool", "lt", distance, Constant(count)
        )
        return self.element(node, "is_near", sizes, "bool", "and", is_not_before, is_not_behind)

    def added_where(self, node: FxNode, gradient: Node, is_there: Node, other: Node) -> Node:
        """Return a gradient, with another added where a condition holds."""
        sizes = gradient.sizes
        added = self.element(node, "added", sizes, "float", "where", is_there, other, Constant(0.0))
        return self.element(node, "grad", sizes, "float", "add", gradient, added)

    def op_replication_pad1d_backward(self, node: FxNode) -> Node:
        """Return for each element its gradient, and for those at the edges the sum of those of
        their copies."""
        gradient: Node = self.known[node.args[0]]
        sizes = self.sizes_of(node)
        for dim, before, behind in self.paddings(node, node.args[2], len(sizes)):
            if not 0 <= min(before, behind) <= max(before, behind) <= MOST_COPIES:
                self.refuse(node)
            gradient = self.edges_added(node, gradient, dim, sizes[dim], before, behind)
        return gradient

    op_replication_pad2d_backward = op_replication_pad1d_backward
    op_replication_pad3d_backward = op_replication_pad1d_backward

    def edges_added(
        self, node: FxNode, gradient: Node, dim: int, size: sympy.Expr, before: int, behind: int
    ) -> Node:
        """Return the middle of a gradient, the parts before and behind it added to its ends."""
        middle = self.parts.cut(gradient, dim, before, size, 1)
        position = self.along(node, middle.sizes, dim)
        for count, begin, edge in (
            (before, sympy.Integer(0), sympy.Integer(0)),
            (behind, before + size, size - 1),
        ):
            if not count:
                continue
            copies = [
                self.parts.cut(gradient, dim, self.exact(begin + one), ONE, 1)
                for one in range(count)
            ]
            total = copies[0]
            for copy in copies[1:]:
                total = self.element(node, "copies", copy.sizes, "float", "add", total, copy)
            is_edge = self.element(
                node, "is_edge", position.sizes, "bool", "eq", position, self.size_number(edge)
            )
            middle = self.added_where(node, middle, is_edge, total)
        return middle

    # --- adding

    def call(self, node: FxNode, template: str, *operands: object) -> Node:
        """Return the result of a PyTorch call; ``template`` is its text with the operands' places,
        in which ``compute`` is the dtype of the arithmetic."""
        common = self.common(node)
        return Call(**common, operator=template, operands=operands)

    def added(self, node: FxNode, base: Node, template: str, values: Node, *rest: object) -> Node:
        """Return ``base`` with values added at positions, in the call ``template``, in which
        ``BASE`` stands for a copy of it."""
        start: object = base
        text = "{1}.to({2}, copy=True, memory_format=torch.contiguous_format)"
        if _is_zero(base):
            start, text = base.sizes, "torch.zeros({1}, dtype={2}, device={0}.device)"
        return self.call(node, template.replace("BASE", text), values, start, base.kind, *rest)

    def op_embedding_dense_backward(self, node: FxNode) -> Node:
        gradient, index = self.known[node.args[0]], self.known[node.args[1]]
        padding, by_frequency = node.args[3], node.args[4]
        if by_frequency:
            self.refuse(node)
        if number_of(padding) >= 0:
            is_padding = self.element(
                node, "is_padding", index.sizes, "bool", "eq", index, Constant(padding)
            )
            is_padding = self.spread(node, is_padding, 0, 1)
            gradient = self.element(
                node, gradient.name, gradient.sizes, "float", "where",
                is_padding, Constant(0.0), gradient,
            )  # fmt: skip
        sizes = self.sizes_of(node)
        return self.call(
            node,
            f"{ADDED}(torch.zeros({{1}}, dtype={{2}}, device={{0}}.device), 0, {{3}}, {{0}})",
            gradient, sizes, "float", index,
        )  # fmt: skip

    def op_index_put(self, node: FxNode) -> Node:
        base: Node = self.known[node.args[0]]
        indices = tuple(one and self.known[one] for one in node.args[1])
        values: Node = self.known[node.args[2]]
        accumulates = len(node.args) > 3 and bool(node.args[3])
        if any(one is not None and one.kind == "bool" for one in indices):
            if not values.sizes and not accumulates and len(indices) == 1:
                return self.masked(node, base, indices[0], values)
            self.refuse(node)
        return self.put(node, base, indices, values, accumulates)

    def put(
        self,
        node: FxNode,
        base: Node,
        indices: Sequence[Node | None],
        values: Node,
        accumulates: bool,
    ) -> Node:
        """Return ``base`` with values put at indices, or added there."""
        dim = next((place for place, one in enumerate(indices) if one is not None), 0)
        behind = indices[dim:]
        if accumulates and base.kind == "float" and base.sizes and None not in behind:
            template = f"{ADDED_AT}(BASE, {{4}}, {{3}}, {{0}})"
            return self.added(node, base, template, values, tuple(behind), dim)
        adds = ", accumulate=True" if accumulates else ""
        template = f"BASE.index_put_({{3}}, {{0}}.to({{2}}){adds})"
        if None in indices:  # which the method does not take
            template = f"torch.ops.aten.index_put_(BASE, {{3}}, {{0}}.to({{2}}){adds})"
        return self.added(node, base, template, values, tuple(indices))

    op__unsafe_index_put = op_index_put

    def masked(self, node: FxNode, base: Node, mask: Node, value: Node) -> Node:
        """Return ``base`` with one value where the mask of its first dimensions is true."""
        mask = self.spread(node, mask, 0, len(base.sizes) - len(mask.sizes))
        return self.pointwise(node, "where", (mask, self.as_kind(node, value), base))

    def scattered_anywhere(self, node: FxNode, template: str) -> Node:
        """Return the result of scattering values to any positions along a dimension."""
        base, index = self.known[node.args[0]], self.known[node.args[2]]
        values = self.known.get(node.args[3])
        if not isinstance(values, Node):
            values = self.element(
                node, "values", index.sizes, base.kind, "same", self.value(node.args[3])
            )
        return self.added(
            node,
            base,
            f"BASE.{template}({{3}}, {{4}}, {{0}}.to({{2}}))",
            values, node.args[1], index,
        )  # fmt: skip

    def op_index_add(self, node: FxNode) -> Node:
        arguments = arguments_of(node)
        if arguments.get("alpha", 1) != 1:
            self.refuse(node)
        base, index = self.known[node.args[0]], self.known[node.args[2]]
        if not base.sizes:
            self.refuse(node)
        dim, values = node.args[1] % len(base.sizes), self.known[node.args[3]]
        if not index.sizes:
            return self.put(node, base, (*[None] * dim, index), values, True)
        template = f"{ADDED}(BASE, {{4}}, {{3}}, {{0}})"
        return self.added(node, base, template, values, index, dim)

    def op_index_copy(self, node: FxNode) -> Node:
        return self.scattered_anywhere(node, "index_copy_")


def _is_zero(node: Node) -> bool:
    found = constant_of(node)
    return found is not None and found.value == 0
