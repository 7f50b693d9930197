"""Lower rearrangements, slices, and tensors that are put together from parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from fuselab.ejection.adaptive_windows import AdaptivePooling
from fuselab.ejection.calls import source_line
from fuselab.ejection.graph_nodes import FxNode, arguments_of, expression_of
from fuselab.ejection.joined_rows import is_reduced
from fuselab.ejection.kernels import ancestors
from fuselab.ejection.loops import (
    SAME,
    Call,
    Constant,
    Index,
    Node,
    Pieces,
    Reduction,
    Splitter,
    View,
)
from fuselab.ejection.parts import regrouped, unexpanded
from fuselab.ejection.steps import Sizes, inserted, kind_of, number_of

BORDER_SHARE = 8  # a border is at most one part in so many of a dimension


def _of_reductions(node: Node) -> bool:
    """Return whether a value is computed from sums, which a kernel stores before another reads them
    at positions that it computes."""
    return any(isinstance(one, Reduction) for one in ancestors(node))


class Arrangements(AdaptivePooling):
    """Views, which move no data, and cuts and joins of tensors."""

    def op_expand(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        return self.view(node, source, lambda index, sizes, _: unexpanded(index, sizes))

    def op_unsqueeze(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        dim = node.args[1] % (len(source.sizes) + 1)
        return self.view(node, source, lambda index, *_: (*index[:dim], *index[dim + 1 :]))

    def op_squeeze(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        rank = len(source.sizes)
        dims = node.args[1] if len(node.args) > 1 else range(rank)
        dims = [dims] if isinstance(dims, int) else dims
        gone = sorted(dim % rank for dim in dims if source.sizes[dim % rank] == 1)
        return self.view(node, source, inserted(gone))

    def op_permute(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        order = [dim % len(source.sizes) for dim in node.args[1]]
        places = [order.index(dim) for dim in range(len(order))]
        return self.view(node, source, lambda index, *_: tuple(index[place] for place in places))

    def op_transpose(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        first, second = (dim % len(source.sizes) for dim in node.args[1:3])

        def index_of(index: Index, *_: Any) -> Index:
            swapped = list(index)
            swapped[first], swapped[second] = index[second], index[first]
            return tuple(swapped)

        return self.view(node, source, index_of)

    # --- parts of tensors

    def op_slice(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        dim, [(start, step, length)] = self.regions_of(node)
        return self.parts.cut(source, dim, start, length, step)

    def op_select(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        dim = node.args[1] % len(source.sizes)
        return self.selected(node, source, dim, self.start(node, node.args[2], source.sizes[dim]))

    def selected(self, node: FxNode, source: Node, dim: int, place: sympy.Expr) -> Node:
        part = self.parts.cut(source, dim, place, sympy.Integer(1), 1)
        sizes = (*source.sizes[:dim], *source.sizes[dim + 1 :])
        return self.parts.view(
            View(source.name, sizes, source.kind, source_line(node), False, part, inserted((dim,)))
        )

    def op_unbind(self, node: FxNode) -> tuple[Node, ...]:
        source: Node = self.known[node.args[0]]
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(source.sizes)
        return tuple(
            self.selected(node, source, dim, sympy.Integer(place))
            for place in range(len(node.meta["val"]))
        )

    def op_split(self, node: FxNode) -> tuple[Node, ...]:
        source: Node = self.known[node.args[0]]
        dim, regions = self.regions_of(node)
        return tuple(
            self.parts.cut(source, dim, start, length, step) for start, step, length in regions
        )

    op_split_with_sizes = op_split

    def op_cat(self, node: FxNode) -> Node:
        sources = [self.known[one] for one in node.args[0]]
        rank = len(node.meta["val"].shape)
        dim = (node.args[1] if len(node.args) > 1 else 0) % max(rank, 1)
        kind = kind_of(node.meta["val"].dtype)
        sources = [
            self.converted(node, one, kind) for one in sources if len(one.sizes) == rank
        ]  # PyTorch leaves out empty tensors of one dimension
        joined = self.parts.joined(self.common(node), dim, sources)
        return self.stored_if_reduced(node, joined)

    def stored_if_reduced(self, node: FxNode, joined: Node) -> Node:
        """Return what is put together from parts as a tensor that is stored first, where it is
        reduced along that dimension and its parts are many or have several sizes: kernels would
        read them twice, each in a launch of its own."""
        if not isinstance(joined, Pieces) or self.parts.reduces_together(joined):
            return joined
        if node not in self.forward or not is_reduced(node, joined.dim, self.forward):
            return joined
        return Call(**self.common(node), operator=SAME, operands=(joined,))

    def op_stack(self, node: FxNode) -> Node:
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(node.meta["val"].shape)
        kind = kind_of(node.meta["val"].dtype)
        one = sympy.Integer(1)
        sources = []
        for each in node.args[0]:
            source = self.converted(node, self.known[each], kind)
            sizes = (*source.sizes[:dim], one, *source.sizes[dim:])
            sources.append(self.parts.view(View(
                source.name, sizes, kind, source_line(node), False, source,
                lambda index, *_: (*index[:dim], *index[dim + 1 :]),
            )))  # fmt: skip
        joined = self.parts.joined(self.common(node), dim, sources)
        return self.stored_if_reduced(node, joined)

    def op_slice_backward(self, node: FxNode) -> Node:
        gradient: Node = self.known[node.args[0]]
        _, _, dim, start, _, step = node.args
        return self.within(node, gradient, dim % len(gradient.sizes), start, step)

    def op_select_backward(self, node: FxNode) -> Node:
        gradient: Node = self.known[node.args[0]]
        dim = node.args[2] % (len(gradient.sizes) + 1)
        sizes = (*gradient.sizes[:dim], sympy.Integer(1), *gradient.sizes[dim:])
        gradient = self.parts.view(View(
            gradient.name, sizes, gradient.kind, source_line(node), False, gradient,
            lambda index, *_: (*index[:dim], *index[dim + 1 :]),
        ))  # fmt: skip
        return self.within(node, gradient, dim, node.args[3], 1)

    def within(
        self, node: FxNode, part: Node, dim: int, start: Any, step: int, around: Node | None = None
    ) -> Node:
        """Return ``part`` as a slice of a tensor that is ``around``, or zero, elsewhere."""
        common = self.common(node)
        whole = common["sizes"][dim]
        start = self.start(node, start, whole)
        rest = whole - part.sizes[dim]
        if step == 1 and self.is_border(rest, whole) and not _of_reductions(part):
            end = self.exact(rest - start)
            return self.surrounded(node, part, [(dim, start, end)], around or Constant(0.0))
        around = around or self.pointwise(node, "same", (Constant(0),))
        return self.parts.placed(common, dim, start, step, part, around)

    def is_border(self, rest: sympy.Expr, whole: sympy.Expr) -> bool:
        """Return whether a part of a dimension is so small that a kernel of it would cost more than
        looking in the kernel of the whole where an element lies."""
        return 0 < self.hint(rest) * BORDER_SHARE <= self.hint(whole)

    def op_slice_scatter(self, node: FxNode) -> Node:
        arguments = arguments_of(node)
        around, part = self.known[node.args[0]], self.known[node.args[1]]
        dim = arguments.get("dim", 0) % len(around.sizes)
        return self.within(
            node, part, dim, arguments.get("start"), arguments.get("step", 1), around
        )

    def op_select_scatter(self, node: FxNode) -> Node:
        around, part = self.known[node.args[0]], self.known[node.args[1]]
        dim = node.args[2] % len(around.sizes)
        sizes = (*part.sizes[:dim], sympy.Integer(1), *part.sizes[dim:])
        part = self.parts.view(View(
            part.name, sizes, part.kind, source_line(node), False, part,
            lambda index, *_: (*index[:dim], *index[dim + 1 :]),
        ))  # fmt: skip
        return self.within(node, part, dim, node.args[3], 1, around)

    def op_constant_pad_nd(self, node: FxNode) -> Node:
        result: Node = self.known[node.args[0]]
        amounts = node.args[1]
        value = self.value(node.args[2] if len(node.args) > 2 else 0)
        rank = len(result.sizes)
        added: list[tuple[int, sympy.Expr, sympy.Expr]] = []
        for place in range(len(amounts) // 2):
            dim = rank - 1 - place
            before, behind = (
                self.exact(expression_of(number_of(one)))
                for one in amounts[2 * place : 2 * place + 2]
            )
            first, last = (
                -one if self.hint(one) < 0 else sympy.Integer(0) for one in (before, behind)
            )
            if first != 0 or last != 0:
                size = self.exact(result.sizes[dim] - first - last)
                result = self.parts.cut(result, dim, first, size, 1)
            before, behind = (
                one if self.hint(one) > 0 else sympy.Integer(0) for one in (before, behind)
            )
            if before != 0 or behind != 0:
                added.append((dim, before, behind))
        if not added:
            return result
        if _of_reductions(result):
            return self.joined_to(node, result, added, value)
        return self.surrounded(node, result, added, value)

    def surrounded(
        self,
        node: FxNode,
        source: Node,
        added: Sequence[tuple[int, sympy.Expr, sympy.Expr]],
        value: Any,
    ) -> Node:
        """Return a tensor with a value around it: each element is chosen or that value."""
        sizes = list(source.sizes)
        for dim, before, behind in added:
            sizes[dim] = self.exact(sizes[dim] + before + behind)
        places: dict[int, Node] = {}
        conditions: list[Node] = []
        for dim, before, behind in added:
            place = self.along(node, sizes, dim)
            if before != 0:
                first = self.size_number(before)
                place = self.whole(node, "place", place.sizes, "sub", place, first)
            is_behind_start, is_before_end = self.in_dimension(node, place, source.sizes[dim])
            if before != 0:
                conditions.append(is_behind_start)
            if behind != 0:
                conditions.append(is_before_end)
            places[dim] = place
        is_inside = self.both(node, conditions)
        if isinstance(value, Constant) and source.kind != "float":
            value = Constant({"int": int, "bool": bool}[source.kind](value.value))
        safe = {dim: self.inside_or_first(node, one, is_inside) for dim, one in places.items()}
        safe_places = [safe.get(dim) for dim in range(len(sizes))]
        chosen = self.choice(node, sizes, source, safe_places, range(len(sizes)))
        return self.element(node, "padded", sizes, source.kind, "where", is_inside, chosen, value)

    def joined_to(
        self,
        node: FxNode,
        result: Node,
        added: Sequence[tuple[int, sympy.Expr, sympy.Expr]],
        value: Any,
    ) -> Node:
        """Return a tensor whose parts are written apart: a result of a reduction, which would else
        be stored before it is chosen from, and the value around it."""
        for dim, *amounts in added:
            for amount, is_front in zip(amounts, (True, False), strict=True):
                if amount == 0:
                    continue
                size = result.sizes[dim]
                sizes = (*result.sizes[:dim], amount, *result.sizes[dim + 1 :])
                filled = self.element(node, "filled", sizes, result.kind, "same", value)
                whole = (*result.sizes[:dim], self.exact(size + amount), *result.sizes[dim + 1 :])
                common = {**self.common(node), "sizes": whole}
                parts = [filled, result] if is_front else [result, filled]
                result = self.parts.joined(common, dim, parts)
        return result

    def op_roll(self, node: FxNode) -> Node:
        result: Node = self.known[node.args[0]]
        shifts, dims = node.args[1], node.args[2] if len(node.args) > 2 else []
        if not dims:
            return self.rolled_flat(node, result, number_of(shifts[0]))
        for shift, dim in zip(shifts, dims, strict=True):
            dim %= len(result.sizes)
            size = result.sizes[dim]
            amount = self.exact(expression_of(number_of(shift)))
            hint = self.hint(amount)
            is_one = len(dims) == 1 and 0 < abs(hint) < self.hint(size)
            if not is_one or not _of_reductions(result):
                result = self.rolled(node, result, dim, amount)
                continue
            front = self.exact(size - amount) if hint > 0 else -amount
            parts = [
                self.parts.cut(result, dim, front, self.exact(size - front), 1),
                self.parts.cut(result, dim, sympy.Integer(0), front, 1),
            ]
            result = self.parts.joined(self.common(node), dim, parts)
        return result

    def op_repeat(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        missing = len(node.args[1]) - len(source.sizes)

        def index_of(index: Index, sizes: Sizes, splitter: Splitter) -> Index:
            found = []
            for axes, size, copies in zip(index[missing:], sizes, repeats[missing:], strict=True):
                if size == 1 or copies == 1:
                    found.append(() if size == 1 else axes)
                else:
                    found.append(splitter.regroup(axes, (copies, size))[1])
            return tuple(found)

        repeats = [self.exact(expression_of(number_of(one))) for one in node.args[1]]
        return self.view(node, source, index_of)

    def op_view(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        return self.view(node, source, regrouped)

    op__unsafe_view = op_reshape = op_view
