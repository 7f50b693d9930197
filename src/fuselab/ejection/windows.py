"""Pooling and unfolding: windows over a tensor, whose elements are the columns of a kernel.

A window's elements are a ``Choice``, at positions computed from those of the result and within the
window. The gradient gathers too: an element sums over the windows that cover it, which are at most
as many along a dimension as steps fit in a window. Where these are many, PyTorch scatters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import sympy

from fuselab.ejection.calls import source_line
from fuselab.ejection.capture import user_name
from fuselab.ejection.chosen import ChosenElements
from fuselab.ejection.exact_sizes import Floored
from fuselab.ejection.graph_nodes import FxNode, arguments_of
from fuselab.ejection.loops import Constant, Node, Reduction, View
from fuselab.ejection.steps import number_of

# The most windows over an element whose gradients a kernel gathers, by their dimensions; of more,
# gathering is slower than PyTorch's scattering on a CPU.
_MOST_COVERING = {1: 16, 2: 16, 3: 4}


@dataclass(frozen=True)
class Windows:
    """Windows over the last dimensions of a tensor; each tuple has one entry for each of them.

    ``sizes`` are those of the tensor, ``results`` the number of windows along each dimension.
    ``may_leave`` says whether a window can reach beyond the tensor.
    """

    sizes: tuple[sympy.Expr, ...]
    results: tuple[sympy.Expr, ...]
    kernel: tuple[int, ...]
    step: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    may_leave: bool

    @property
    def rank(self) -> int:
        return len(self.kernel)

    @property
    def words(self) -> tuple[str, ...]:
        return _words(self.rank)

    @cached_property
    def window(self) -> tuple[sympy.Expr, ...]:
        return tuple(map(sympy.Integer, self.kernel))

    @cached_property
    def covering(self) -> tuple[sympy.Expr, ...]:
        """How many windows can cover an element, along each dimension."""
        reaches = (
            (kernel - 1) * dilation + 1
            for kernel, dilation in zip(self.kernel, self.dilation, strict=True)
        )
        pairs = zip(reaches, self.step, strict=True)
        return tuple(sympy.Integer(-(-reach // step)) for reach, step in pairs)

    @property
    def cover_often(self) -> bool:
        """Whether so many windows can cover an element that its gradient is not gathered."""
        return bool(sympy.prod(self.covering) > _MOST_COVERING[self.rank])


@dataclass(frozen=True)
class AdaptiveWindows:
    """Adaptive windows over the last dimensions of a tensor, as ``Windows`` has those of a step.

    ``are_equal`` says for each dimension whether all windows have one length. ``covering`` is how
    many windows can cover an element.
    """

    sizes: tuple[sympy.Expr, ...]
    results: tuple[sympy.Expr, ...]
    are_equal: tuple[bool, ...]
    covering: tuple[sympy.Expr, ...]

    cover_often = False

    @property
    def rank(self) -> int:
        return len(self.results)

    @property
    def words(self) -> tuple[str, ...]:
        return _words(self.rank)

    @cached_property
    def window(self) -> tuple[sympy.Expr, ...]:
        """The most elements of a window, along each dimension."""
        both = zip(self.sizes, self.results, self.are_equal, strict=True)
        return tuple(
            _quotient(size, count) if is_equal else Floored(size, count) + 2
            for size, count, is_equal in both
        )


def _quotient(size: sympy.Expr, count: sympy.Expr) -> sympy.Expr:
    """Return a size divided by a number of windows that divides it."""
    return size / count if size.is_number or count in (1, size) else size // count


AnyWindows = Windows | AdaptiveWindows


def _words(rank: int) -> tuple[str, ...]:
    """Return the names of the dimensions of windows."""
    return ("depth", "height", "width")[3 - rank :]


def sizes_of_both(one: Node, other: Node) -> tuple[sympy.Expr, ...]:
    """Return the sizes of two tensors that are broadcast over each other."""
    pairs = zip(one.sizes, other.sizes, strict=True)
    return tuple(second if first == 1 else first for first, second in pairs)


class Pooling(ChosenElements):
    """The lowering of these operators."""

    def windows_of(self, node: FxNode, source: Node, results: Sequence[sympy.Expr]) -> Windows:
        """Return the windows that the arguments of a pooling operator describe; ``results`` are
        the sizes of its result."""
        arguments = arguments_of(node)
        rank = len(arguments["kernel_size"])

        def each(name: str, default: Sequence[int]) -> tuple[int, ...]:
            given = [number_of(one) for one in arguments.get(name) or default]
            if not all(isinstance(one, int) for one in given):
                self.refuse(node)
            return tuple(given * rank if len(given) == 1 else given)

        kernel = each("kernel_size", ())
        padding = each("padding", (0,))
        return Windows(
            source.sizes[-rank:],
            tuple(results[-rank:]),
            kernel,
            each("stride", kernel),
            padding,
            each("dilation", (1,)),
            any(padding) or bool(arguments.get("ceil_mode", False)),
        )

    def both(self, node: FxNode, conditions: Sequence[Node]) -> Node | None:
        """Return whether all of some conditions hold; None if there are none."""
        found: Node | None = None
        for one in conditions:
            if found is None:
                found = one
                continue
            sizes = sizes_of_both(found, one)
            found = self.element(node, "is_inside", sizes, "bool", "and", found, one)
        return found

    def in_dimension(self, node: FxNode, place: Node, size: sympy.Expr) -> list[Node]:
        """Return the conditions that a position is in a dimension."""
        return [
            self.element(node, "is_inside", place.sizes, "bool", "ge", place, Constant(0)),
            self.element(
                node, "is_inside", place.sizes, "bool", "lt", place, self.size_number(size)
            ),
        ]

    def affine(self, node: FxNode, label: str, place: Node, factor: int, added: int) -> Node:
        """Return ``place * factor + added``."""
        if factor != 1:
            place = self.whole(node, label, place.sizes, "mul", place, Constant(factor))
        if added:
            place = self.whole(node, label, place.sizes, "add", place, Constant(added))
        return place

    # --- forward

    def places_in(
        self, node: FxNode, windows: AnyWindows, wide: Sequence[sympy.Expr]
    ) -> tuple[list[Node], Node | None]:
        """Return the position in the tensor along each dimension of a window's element, and whether
        it is inside; None if it always is. ``wide`` has the sizes of the results, then the
        window's."""
        assert isinstance(windows, Windows)
        first = len(wide) - 2 * windows.rank
        places, conditions = [], []
        for dim, word in enumerate(windows.words):
            start = self.affine(
                node,
                "start",
                self.along(node, wide, first + dim),
                windows.step[dim],
                -windows.padding[dim],
            )
            inner = self.affine(
                node,
                "within",
                self.along(node, wide, first + windows.rank + dim),
                windows.dilation[dim],
                0,
            )
            sizes = tuple(
                size if place in (first + dim, first + windows.rank + dim) else sympy.Integer(1)
                for place, size in enumerate(wide)
            )
            place = self.whole(node, f"{word}_place", sizes, "add", start, inner)
            if windows.may_leave:
                conditions += self.in_dimension(node, place, windows.sizes[dim])
            places.append(place)
        return places, self.both(node, conditions)

    def in_windows(
        self, node: FxNode, source: Node, windows: AnyWindows, results: Sequence[sympy.Expr]
    ) -> tuple[Node, list[Node], Node | None]:
        """Return the elements of all windows, their positions and whether they are inside."""
        wide = (*results, *windows.window)
        places, is_inside = self.places_in(node, windows, wide)
        first = len(source.sizes) - windows.rank
        safe = [self.inside_or_first(node, place, is_inside) for place in places]
        elements = self.choice(
            node, wide, source, (*[None] * first, *safe), (*range(first), *[None] * windows.rank)
        )
        return elements, places, is_inside

    def inside_or_first(self, node: FxNode, place: Node, is_inside: Node | None) -> Node:
        """Return the position, 0 where it is outside."""
        if is_inside is None:
            return place
        return self.whole(
            node, f"inner_{place.name}", sizes_of_both(is_inside, place), "where",
            is_inside, place, Constant(0),
        )  # fmt: skip

    def over_windows(
        self,
        node: FxNode,
        label: str,
        function: str,
        source: Node,
        rank: int,
        places: sympy.Expr | None = None,
    ) -> Node:
        """Return the reduction over the last ``rank`` dimensions; ``places`` is ``Reduction``'s."""
        sizes = source.sizes[:-rank]
        if all(size == 1 for size in source.sizes[-rank:]):
            return self.parts.view(
                View(
                    source.name, sizes, source.kind, source_line(node), False, source,
                    lambda index, *_: (*index, *[()] * rank),
                )
            )  # fmt: skip
        dims = tuple(range(len(sizes), len(source.sizes)))
        return self.parts.reduction(
            Reduction(
                label, sizes, source.kind, source_line(node), False, function, source, dims,
                places=places,
            )
        )  # fmt: skip

    def op_avg_pool2d(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        results = self.floored_sizes(node.meta["val"])
        windows = self.windows_of(node, source, results)
        elements, _, is_inside = self.in_windows(node, source, windows, results)
        if is_inside is not None:
            elements = self.element(
                node, "element", elements.sizes, elements.kind, "where",
                is_inside, elements, Constant(0.0),
            )  # fmt: skip
        total = self.over_windows(node, "window_sum", "sum", elements, windows.rank)
        return self.pointwise(node, "div", (total, self.divisor(node, windows, results)))

    op_avg_pool1d = op_avg_pool3d = op_avg_pool2d

    def divisor(self, node: FxNode, windows: Windows, results: Sequence[sympy.Expr]) -> Any:
        """Return the number that a window's sum is divided by."""
        arguments = arguments_of(node)
        override = arguments.get("divisor_override")
        if override is not None:
            return Constant(override)
        counts_padding = arguments.get("count_include_pad", True)
        # Only with ``ceil_mode`` a window may end behind the padding.
        if not windows.may_leave or (counts_padding and not arguments.get("ceil_mode", False)):
            return Constant(int(sympy.prod(windows.window)))
        count: Any = None
        for dim in range(windows.rank):
            first = len(results) - windows.rank
            position = self.along(node, results, first + dim)
            sizes = position.sizes
            start = self.affine(node, "start", position, windows.step[dim], -windows.padding[dim])
            end = self.affine(node, "end", start, 1, windows.kernel[dim])
            last = windows.sizes[dim] + (windows.padding[dim] if counts_padding else 0)
            end = self.whole(node, "end", sizes, "minimum", end, self.size_number(last))
            if not counts_padding:
                start = self.whole(node, "start", sizes, "maximum", start, Constant(0))
            length = self.whole(node, "length", sizes, "sub", end, start)
            count = length if count is None else self.product(node, count, length)
        return count

    def product(self, node: FxNode, one: Node, other: Node) -> Node:
        return self.whole(node, "count", sizes_of_both(one, other), "mul", one, other)

    def op_max_pool2d_with_indices(self, node: FxNode) -> tuple[Node, Node]:
        source: Node = self.known[node.args[0]]
        results = self.floored_sizes(node.meta["val"][0])
        return self.largest(node, source, self.windows_of(node, source, results), results)

    op_max_pool3d_with_indices = op_max_pool2d_with_indices

    def largest(
        self, node: FxNode, source: Node, windows: AnyWindows, results: Sequence[sympy.Expr]
    ) -> tuple[Node, Node]:
        """Return the largest element of each window, and its place among all elements of the
        windows' dimensions."""
        elements, places, is_inside = self.in_windows(node, source, windows, results)
        wide = elements.sizes
        if is_inside is not None:
            lowest = Constant(float("-inf") if source.kind == "float" else -(2**63))
            elements = self.element(
                node, "element", wide, source.kind, "where", is_inside, elements, lowest
            )
        rank, name = windows.rank, user_name(node)
        largest = self.over_windows(node, name, "amax", elements, rank)
        is_it = self.element(
            node, "is_largest", wide, "bool", "eq", elements, self.spread(node, largest, 0, rank)
        )
        flat = self.flat(node, places, windows, wide)
        if source.kind == "float":
            # Of equal elements the first counts, of NaNs the last: its negative place is the least.
            is_nan = self.element(node, "is_nan", wide, "bool", "isnan", elements)
            is_it = self.element(node, "is_largest", wide, "bool", "or", is_it, is_nan)
            from_end = self.whole(node, "place", wide, "neg", flat)
            flat = self.whole(node, "place", wide, "where", is_nan, from_end, flat)
        if is_inside is not None:
            is_it = self.element(node, "is_largest", wide, "bool", "and", is_it, is_inside)
        count = sympy.prod(list(windows.sizes))
        behind = self.size_number(count)
        place = self.whole(node, "place", wide, "where", is_it, flat, behind)
        place = self.over_windows(node, f"{name}_place", "amin", place, rank, count)
        if source.kind == "float":
            place = self.whole(node, place.name, place.sizes, "abs", place)
        return largest, place

    def flat(
        self, node: FxNode, places: Sequence[Node], windows: AnyWindows, wide: Sequence[sympy.Expr]
    ) -> Node:
        """Return the position among all elements of the windows' dimensions."""
        found = places[0]
        for place, size in zip(places[1:], windows.sizes[1:], strict=True):
            rows = self.whole(node, "rows", found.sizes, "mul", found, self.size_number(size))
            found = self.whole(node, "place", sizes_of_both(rows, place), "add", rows, place)
        return found

    # --- backward

    def covering(
        self, node: FxNode, windows: AnyWindows, wide: Sequence[sympy.Expr], may_miss: bool
    ) -> tuple[list[Node], Node | None]:
        """Return along each dimension a window that can cover an element, and whether it does, or
        if it ``may_miss`` the element, whether there is such a window. ``wide`` has the sizes of
        the tensor, then the numbers of windows."""
        assert isinstance(windows, Windows)
        first = len(wide) - 2 * windows.rank
        places, conditions = [], []
        for dim, word in enumerate(windows.words):
            step, padding = windows.step[dim], windows.padding[dim]
            position = self.affine(node, "padded", self.along(node, wide, first + dim), 1, padding)
            window = position
            if step != 1:
                window = self.whole(
                    node, f"{word}_window", position.sizes, "intdiv", position, Constant(step)
                )
            sizes = tuple(
                size if place in (first + dim, first + windows.rank + dim) else sympy.Integer(1)
                for place, size in enumerate(wide)
            )
            place = window
            if windows.covering[dim] != 1:
                earlier = self.along(node, wide, first + windows.rank + dim)
                place = self.whole(node, f"{word}_window", sizes, "sub", window, earlier)
            start = self.affine(node, "start", place, step, 0)
            distance = self.whole(node, "distance", sizes, "sub", position, start)
            reach = (windows.kernel[dim] - 1) * windows.dilation[dim] + 1
            inside = self.in_dimension(node, place, windows.results[dim])
            # A position divided by the step is not negative.
            conditions += inside if windows.covering[dim] != 1 else inside[1:]
            # The last of these windows begins ``covering * step - 1`` before the element at most.
            if windows.covering[dim] * step > reach and not may_miss:
                conditions.append(
                    self.element(node, "is_inside", sizes, "bool", "lt", distance, Constant(reach))
                )
            places.append(place)
        return places, self.both(node, conditions)

    def from_windows(
        self, node: FxNode, of_windows: Sequence[Node], windows: AnyWindows, may_miss: bool = False
    ) -> tuple[list[Node], Node | None]:
        """Return tensors of results at the windows that can cover each element, and whether they
        do, or if they ``may_miss`` it, whether they exist; None if that is always so."""
        sizes = (*self.sizes_of(node), *windows.covering)
        places, is_inside = self.covering(node, windows, sizes, may_miss)
        first = len(of_windows[0].sizes) - windows.rank
        safe = [self.inside_or_first(node, place, is_inside) for place in places]
        found = [
            self.choice(
                node, sizes, one, (*[None] * first, *safe), (*range(first), *[None] * windows.rank)
            )
            for one in of_windows
        ]
        return found, is_inside

    def gathered(self, node: FxNode, gradient: Node, is_inside: Node | None, rank: int) -> Node:
        """Return the sum over windows of the gradients that are an element's; None: all are."""
        if is_inside is None:
            return self.over_windows(node, user_name(node), "sum", gradient, rank)
        given = self.element(
            node, gradient.name, gradient.sizes, "float", "where",
            is_inside, gradient, Constant(0.0),
        )  # fmt: skip
        return self.over_windows(node, user_name(node), "sum", given, rank)

    def op_avg_pool2d_backward(self, node: FxNode) -> Node:
        gradient, source = self.known[node.args[0]], self.known[node.args[1]]
        windows = self.windows_of(node, source, gradient.sizes)
        if windows.cover_often:
            return self.averages_scattered(node, gradient, windows)
        divisor = self.divisor(node, windows, gradient.sizes)
        share = self.element(node, gradient.name, gradient.sizes, "float", "div", gradient, divisor)
        (of_windows,), is_inside = self.from_windows(node, [share], windows)
        return self.gathered(node, of_windows, is_inside, windows.rank)

    op_avg_pool1d_backward = op_avg_pool3d_backward = op_avg_pool2d_backward

    def averages_scattered(self, node: FxNode, gradient: Node, windows: Windows) -> Node:
        """Return what PyTorch's own operator returns, which takes the sizes from a tensor."""
        arguments = arguments_of(node)
        options = (
            windows.kernel,
            windows.step,
            windows.padding,
            bool(arguments.get("ceil_mode", False)),
            bool(arguments.get("count_include_pad", True)),
            arguments.get("divisor_override"),
        )
        return self.call(
            node,
            f"torch.ops.{node.target}({{0}}.to({{2}}), "
            "torch.empty({1}, dtype={2}, device={0}.device), "
            f"{', '.join(map(str, options))})",
            gradient, self.sizes_of(node), "float",
        )  # fmt: skip

    def op_max_pool2d_with_indices_backward(self, node: FxNode) -> Node:
        gradient, source = self.known[node.args[0]], self.known[node.args[1]]
        place: Node = self.known[arguments_of(node)["indices"]]
        windows = self.windows_of(node, source, gradient.sizes)
        return self.gradient_of_largest(node, gradient, place, windows)

    op_max_pool3d_with_indices_backward = op_max_pool2d_with_indices_backward

    def gradient_of_largest(
        self, node: FxNode, gradient: Node, place: Node, windows: AnyWindows
    ) -> Node:
        """Return the gradient of a tensor of whose windows the elements at ``place`` are the
        largest."""
        if windows.cover_often:
            last = f"flatten(-{windows.rank})"
            return self.call(
                node,
                f"torch.zeros({{1}}, dtype={{2}}, device={{0}}.device).{last}"
                f".scatter_add_(-1, {{3}}.{last}, {{0}}.{last}.to({{2}})).view({{1}})",
                gradient, self.sizes_of(node), "float", place,
            )  # fmt: skip
        # The largest element of a window that misses this one is another.
        (of_windows, chosen), is_inside = self.from_windows(
            node, [gradient, place], windows, may_miss=True
        )
        sizes = of_windows.sizes
        first = len(sizes) - 2 * windows.rank
        own = [self.along(node, sizes, first + dim) for dim in range(windows.rank)]
        flat = self.flat(node, own, windows, sizes)
        is_own = self.element(node, "is_largest", sizes, "bool", "eq", chosen, flat)
        if is_inside is not None:
            is_own = self.element(node, "is_largest", sizes, "bool", "and", is_own, is_inside)
        return self.gathered(node, of_windows, is_own, windows.rank)

    # --- unfolding

    def op_unfold(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        sizes = self.floored_sizes(node.meta["val"])
        dim = node.args[1] % max(1, len(source.sizes))
        start = self.affine(node, "start", self.along(node, sizes, dim), node.args[3], 0)
        inner = self.along(node, sizes, len(sizes) - 1)
        both = tuple(
            size if one in (dim, len(sizes) - 1) else sympy.Integer(1)
            for one, size in enumerate(sizes)
        )
        place = self.whole(node, "place", both, "add", start, inner)
        rank = len(source.sizes)
        places = [place if one == dim else None for one in range(rank)]
        return self.named(node, self.choice(node, sizes, source, places, range(rank)))

    def op_unfold_backward(self, node: FxNode) -> Node:
        """Return for each element the sum of the gradients of the windows that cover it."""
        gradient: Node = self.known[node.args[0]]
        dim, kernel, step = (number_of(one) for one in node.args[2:5])
        sizes = self.sizes_of(node)
        dim %= len(sizes)
        windows = Windows(
            (sizes[dim],), (gradient.sizes[dim],), (kernel,), (step,), (0,), (1,), True
        )
        wide = (*sizes, *windows.covering)
        position, earlier = self.along(node, wide, dim), self.along(node, wide, len(sizes))
        both = tuple(
            size if one in (dim, len(sizes)) else sympy.Integer(1) for one, size in enumerate(wide)
        )
        window = position
        if step != 1:
            window = self.whole(node, "window", position.sizes, "intdiv", position, Constant(step))
        if windows.covering[0] != 1:
            window = self.whole(node, "window", both, "sub", window, earlier)
        start = self.affine(node, "start", window, step, 0)
        inner = self.whole(node, "distance", both, "sub", position, start)
        is_short = self.element(node, "is_inside", both, "bool", "lt", inner, Constant(kernel))
        is_inside = self.both(
            node, [*self.in_dimension(node, window, gradient.sizes[dim]), is_short]
        )
        assert is_inside is not None
        places: list[Node | None] = [None] * len(sizes)
        places[dim] = self.inside_or_first(node, window, is_inside)
        places.append(self.inside_or_first(node, inner, is_inside))
        kept = (*range(len(sizes)), None)
        chosen = self.choice(node, wide, gradient, places, kept)
        return self.gathered(node, chosen, is_inside, 1)
