"""Adaptive pooling: windows whose number is given, and which share the elements of a dimension.

Of ``count`` windows over ``size`` elements, window ``i`` begins at ``floor(i * size / count)`` and
ends before ``ceil((i + 1) * size / count)``, as PyTorch's documentation of ``AdaptiveMaxPool2d``
and its kernels have it. Where ``count`` divides ``size`` in the example, all windows have one
length and the package requires that it does; elsewhere neighbouring windows may overlap in an
element, and a kernel goes through as many elements as the longest may have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import sympy

from fuselab.ejection.calls import source_line
from fuselab.ejection.capture import user_name
from fuselab.ejection.graph_nodes import FxNode
from fuselab.ejection.loops import Constant, Index, Node, Reduction, Size, View
from fuselab.ejection.parts import regrouped
from fuselab.ejection.windows import AdaptiveWindows, AnyWindows, Pooling, Windows, sizes_of_both


class AdaptivePooling(Pooling):
    """The lowering of these operators."""

    def adaptive_windows(
        self, node: FxNode, source: Node, results: Sequence[sympy.Expr], rank: int
    ) -> AdaptiveWindows:
        """Return the windows over the last ``rank`` dimensions; ``results`` are the sizes of the
        operator's result."""
        sizes, counts = source.sizes[-rank:], tuple(results[-rank:])
        are_equal, covering = [], []
        for size, count in zip(sizes, counts, strict=True):
            if not count.is_number and count != size:
                self.refuse(node)
            is_equal = count == size or self.hint(size) % int(count) == 0
            are_equal.append(is_equal)
            if not is_equal:  # positions are multiplied by the number of windows, in 32 bits
                self.parts.require(2**31 - 1 - size * (count + 1))
            if is_equal:
                covering.append(sympy.Integer(1))
            elif self.hint(size) > int(count):
                self.parts.require(size - count)
                covering.append(sympy.Integer(2))
            else:
                covering.append(sympy.Integer((int(count) - 1) // self.hint(size) + 2))
                # As many windows cover an element of a longer dimension at most.
                self.parts.require(size - self.hint(size))
        return AdaptiveWindows(sizes, counts, tuple(are_equal), tuple(covering))

    def places_in(
        self, node: FxNode, windows: AnyWindows, wide: Sequence[sympy.Expr]
    ) -> tuple[list[Node], Node | None]:
        if isinstance(windows, Windows):
            return super().places_in(node, windows, wide)
        first = len(wide) - 2 * windows.rank
        places, conditions = [], []
        for dim, word in enumerate(windows.words):
            start, end = self.ends(node, windows, self.along(node, wide, first + dim), dim)
            inner = self.along(node, wide, first + windows.rank + dim)
            place = self.whole(
                node, f"{word}_place", sizes_of_both(start, inner), "add", start, inner
            )
            if end is not None:
                conditions.append(self.is_before(node, place, end))
            places.append(place)
        return places, self.both(node, conditions)

    def in_windows(
        self, node: FxNode, source: Node, windows: AnyWindows, results: Sequence[sympy.Expr]
    ) -> tuple[Node, list[Node], Node | None]:
        if isinstance(windows, Windows) or not all(windows.are_equal):
            return super().in_windows(node, source, windows, results)
        lead = len(results) - windows.rank

        def interleaved(index: Index, *_: Any) -> Index:
            pairs = zip(index[lead : lead + windows.rank], index[-windows.rank :], strict=True)
            return (*index[:lead], *itertools.chain(*pairs))

        blocks = self.blocks(node, source, windows, results)
        wide = (*results, *windows.window)
        line = source_line(node)
        in_order = View(source.name, wide, source.kind, line, False, blocks, interleaved)
        places, _ = self.places_in(node, windows, wide)
        return self.parts.view(in_order), places, None

    def ends(
        self, node: FxNode, windows: AdaptiveWindows, position: Node, dim: int
    ) -> tuple[Node, Node | None]:
        """Return where the windows at ``position`` along a dimension start, and where they end;
        None if all have one length."""
        if windows.are_equal[dim]:
            length = self.size_number(windows.window[dim])
            return self.whole(node, "start", position.sizes, "mul", position, length), None
        size, count = self.size_number(windows.sizes[dim]), int(windows.results[dim])
        before = self.whole(node, "before", position.sizes, "mul", position, size)
        behind = self.whole(node, "behind", position.sizes, "add", before, size)
        return (
            self.whole(node, "start", position.sizes, "intdiv", before, Constant(count)),
            self.rounded_up(node, "end", behind, count),
        )

    def rounded_up(self, node: FxNode, label: str, divided: Node, by: Any) -> Node:
        """Return the quotient of positive integers, rounded up."""
        sizes = divided.sizes
        if isinstance(by, int):
            added = self.affine(node, label, divided, 1, by - 1)
            return self.whole(node, label, sizes, "intdiv", added, Constant(by))
        added = self.whole(node, label, sizes, "add", self.affine(node, label, divided, 1, -1), by)
        return self.whole(node, label, sizes, "intdiv", added, by)

    def is_before(self, node: FxNode, place: Node, end: Node) -> Node:
        return self.element(node, "is_inside", sizes_of_both(place, end), "bool", "lt", place, end)

    def covering(
        self, node: FxNode, windows: AnyWindows, wide: Sequence[sympy.Expr], may_miss: bool
    ) -> tuple[list[Node], Node | None]:
        if isinstance(windows, Windows):
            return super().covering(node, windows, wide, may_miss)
        first = len(wide) - 2 * windows.rank
        places, conditions = [], []
        for dim, word in enumerate(windows.words):
            position = self.along(node, wide, first + dim)
            if windows.are_equal[dim]:
                length = self.size_number(windows.window[dim])
                places.append(
                    self.whole(node, f"{word}_window", position.sizes, "intdiv", position, length)
                )
                continue
            # Element p is in the windows from floor(p * count / size) on, before
            # ceil((p + 1) * count / size).
            size, count = self.size_number(windows.sizes[dim]), int(windows.results[dim])
            scaled = self.affine(node, "scaled", position, count, 0)
            earliest = self.whole(node, f"{word}_window", position.sizes, "intdiv", scaled, size)
            later = self.along(node, wide, first + windows.rank + dim)
            place = self.whole(
                node, f"{word}_window", sizes_of_both(earliest, later), "add", earliest, later
            )
            end = self.rounded_up(node, "end", self.affine(node, "end", scaled, 1, count), size)
            conditions.append(self.is_before(node, place, end))
            places.append(place)
        return places, self.both(node, conditions)

    def from_windows(
        self, node: FxNode, of_windows: Sequence[Node], windows: AnyWindows, may_miss: bool = False
    ) -> tuple[list[Node], Node | None]:
        if isinstance(windows, Windows) or not all(windows.are_equal):
            return super().from_windows(node, of_windows, windows, may_miss)
        spread = [self.spread_over_blocks(node, one, windows) for one in of_windows]
        return [self.spread(node, one, 0, windows.rank) for one in spread], None

    # --- the largest

    def op_adaptive_max_pool2d(self, node: FxNode) -> tuple[Node, Node]:
        source: Node = self.known[node.args[0]]
        results = self.sizes_of_value(node.meta["val"][0])
        windows = self.adaptive_windows(node, source, results, len(node.args[1]))
        return self.largest(node, source, windows, results)

    op_adaptive_max_pool3d = op_adaptive_max_pool2d

    def op_adaptive_max_pool2d_backward(self, node: FxNode) -> Node:
        gradient, source, place = (self.known[one] for one in node.args[:3])
        windows = self.adaptive_windows(node, source, gradient.sizes, 2)
        return self.gradient_of_largest(node, gradient, place, windows)

    def op_adaptive_max_pool3d_backward(self, node: FxNode) -> Node:
        gradient, source, place = (self.known[one] for one in node.args[:3])
        windows = self.adaptive_windows(node, source, gradient.sizes, 3)
        return self.gradient_of_largest(node, gradient, place, windows)

    # --- the mean

    def op__adaptive_avg_pool2d(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        results = self.sizes_of(node)
        windows = self.adaptive_windows(node, source, results, len(node.args[1]))
        if all(windows.are_equal):
            return self.means_of_blocks(node, source, windows, results)
        elements, _, is_inside = self.in_windows(node, source, windows, results)
        elements = self.element(
            node, "element", elements.sizes, "float", "where", is_inside, elements, Constant(0.0)
        )
        total = self.over_windows(node, "window_sum", "sum", elements, windows.rank)
        return self.pointwise(node, "div", (total, self.lengths(node, windows, results)))

    op__adaptive_avg_pool3d = op__adaptive_avg_pool2d

    def lengths(
        self, node: FxNode, windows: AdaptiveWindows, results: Sequence[sympy.Expr]
    ) -> Node | Constant | Size:
        """Return how many elements each window has."""
        first = len(results) - windows.rank
        equal: sympy.Expr = sympy.Integer(1)
        found: Node | None = None
        for dim in range(windows.rank):
            start, end = self.ends(node, windows, self.along(node, results, first + dim), dim)
            if end is None:
                equal *= windows.window[dim]
                continue
            length = self.whole(node, "length", start.sizes, "sub", end, start)
            found = length if found is None else self.product(node, found, length)
        if found is None or equal == 1:
            return found or self.size_number(equal)
        return self.whole(node, "count", found.sizes, "mul", found, self.size_number(equal))

    def op__adaptive_avg_pool2d_backward(self, node: FxNode) -> Node:
        return self.gradient_of_means(node, 2)

    def op__adaptive_avg_pool3d_backward(self, node: FxNode) -> Node:
        return self.gradient_of_means(node, 3)

    def gradient_of_means(self, node: FxNode, rank: int) -> Node:
        gradient, source = self.known[node.args[0]], self.known[node.args[1]]
        windows = self.adaptive_windows(node, source, gradient.sizes, rank)
        share = self.element(
            node, "share", gradient.sizes, "float", "div",
            gradient, self.lengths(node, windows, gradient.sizes),
        )  # fmt: skip
        if all(windows.are_equal):
            return self.spread_over_blocks(node, share, windows)
        (of_windows,), is_inside = self.from_windows(node, [share], windows)
        return self.gathered(node, of_windows, is_inside, windows.rank)

    # --- windows of one length

    def blocks(
        self,
        node: FxNode,
        source: Node,
        windows: AdaptiveWindows,
        results: Sequence[sympy.Expr],
    ) -> Node:
        """Return the tensor with each of its last dimensions as windows and elements of one."""
        sizes = list(results[: len(results) - windows.rank])
        for count, length in zip(windows.results, windows.window, strict=True):
            sizes += [count, length]
        line = source_line(node)
        return self.parts.view(
            View(source.name, tuple(sizes), source.kind, line, False, source, regrouped)
        )

    def means_of_blocks(
        self,
        node: FxNode,
        source: Node,
        windows: AdaptiveWindows,
        results: Sequence[sympy.Expr],
    ) -> Node:
        lead = len(results) - windows.rank
        blocks = self.blocks(node, source, windows, results)
        dims = tuple(lead + 2 * dim + 1 for dim in range(windows.rank))
        total = Reduction(
            f"{user_name(node)}_total",
            tuple(results),
            "float",
            source_line(node),
            False,
            "sum",
            blocks,
            dims,
        )
        count = self.size_number(sympy.prod(list(windows.window)))
        return self.pointwise(node, "div", (self.parts.reduction(total), count))

    def spread_over_blocks(self, node: FxNode, given: Node, windows: AdaptiveWindows) -> Node:
        """Return for each element of the operator's result what its window has of ``given``."""
        lead = len(given.sizes) - windows.rank
        sizes = list(given.sizes[:lead])
        for count, length in zip(windows.results, windows.window, strict=True):
            sizes += [count, length]
        name, kind, line = given.name, given.kind, source_line(node)

        def of_window(index: Index, *_: Any) -> Index:
            return (*index[:lead], *index[lead::2])

        spread = self.parts.view(View(name, tuple(sizes), kind, line, False, given, of_window))
        return self.parts.view(
            View(name, self.sizes_of(node), kind, line, False, spread, regrouped)
        )
