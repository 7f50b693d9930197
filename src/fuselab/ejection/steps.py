"""The making of nodes (``loops.py``) from ATen operators, for ``lower.py`` and its parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

from fuselab.ejection.calls import at_line, source_line
from fuselab.ejection.capture import is_user_named, user_name
from fuselab.ejection.exact_sizes import floored, in_example, with_symbols
from fuselab.ejection.graph_nodes import FxNode, arguments_of, expression_of, packet_of
from fuselab.ejection.integers import Integers
from fuselab.ejection.loops import (
    Constant,
    Index,
    Kind,
    Node,
    Pieces,
    Pointwise,
    Rearrangement,
    Reduction,
    Size,
    View,
)
from fuselab.ejection.parts import MOST_REDUCED, Parts, Region
from fuselab.ejection.picks import value_if_inside
from fuselab.ejection.read_in_parts import slices_read
from fuselab.ejection.two_steps import by_rows, in_two_steps, row_by_row
from fuselab.errors import EjectError

_QUANTIZED = (torch.quint8, torch.qint8, torch.qint32, torch.quint4x2, torch.quint2x4)
Sizes = Sequence[sympy.Expr]


class Steps:
    """Hold the nodes that are known, and make new ones."""

    def __init__(
        self, hints: Mapping[sympy.Symbol, int], equal: Mapping[sympy.Symbol, sympy.Expr]
    ) -> None:
        self.known: dict[FxNode, Any] = {}
        self.equal = equal
        self.hints = hints
        self.parts = Parts(hints)
        self.integers = Integers()
        self.forward: Set[FxNode] = frozenset()  # what the outputs are computed from
        self.reduced: set[tuple[Sizes, tuple[int, ...]]] = set()  # sizes, and dimensions of them
        self.floors: dict[sympy.Expr, sympy.Expr] = {}  # divisions that may lose a remainder

    def common(self, node: FxNode, name: str | None = None) -> dict[str, Any]:
        value: Tensor = node.meta["val"]
        return {
            "name": name or user_name(node),
            "sizes": self.sizes_of(node),
            "kind": kind_of(value.dtype),
            "line": source_line(node),
            "is_named": is_user_named(node),
        }

    def value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in self.known:
                return self.known[argument]
            return Size(expression_of(argument.meta["val"]))
        return Constant(as_written(argument))

    def values(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self.value, arguments))

    def pointwise(self, node: FxNode, function: str, operands: tuple[Any, ...]) -> Node:
        return self.parts.pointwise(
            Pointwise(**self.common(node), function=function, operands=operands)
        )

    def sizes_of(self, node: FxNode) -> tuple[sympy.Expr, ...]:
        return self.sizes_of_value(node.meta["val"])

    def sizes_of_value(self, value: Tensor) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a traced tensor."""
        return tuple(self.exact(expression_of(size)) for size in value.shape)

    def exact(self, size: sympy.Expr) -> sympy.Expr:
        return self.parts.exact(with_symbols(size, self.equal).xreplace(self.floors))

    def floored_sizes(self, value: Tensor) -> tuple[sympy.Expr, ...]:
        """Return the sizes of a traced tensor, whose divisions may lose a remainder here and in all
        tensors that are made of it."""
        for size in value.shape:
            self.floors.update(floored(with_symbols(expression_of(size), self.equal)))
        return self.sizes_of_value(value)

    def hint(self, size: sympy.Expr) -> int:
        return in_example(size, self.hints)

    def view(self, node: FxNode, source: Node, index: Rearrangement) -> Node:
        common = self.common(node)
        common["name"] = source.name
        return self.parts.view(View(**common, source=source, index=index))

    def reduction(self, node: FxNode, function: str) -> Node:
        common = self.common(node)
        kind = common["kind"]
        if kind == "bool":  # of truth values the largest and the smallest are wanted: 1 and 0
            common["kind"] = "int"
        source = self.converted(node, self.known[node.args[0]], common["kind"])
        dims, keepdim = self.reduced_dims(node)
        if not dims:  # the sum of a 0-d tensor
            return self.converted(node, source, kind)
        if function == "sum" and len(dims) == 1:
            single = value_if_inside(self.parts, source, dims[0], node not in self.forward)
            if single is not None:
                single = replace(single, name=common["name"], is_named=common["is_named"])
                index = inserted(() if keepdim else dims)
                return self.parts.view(View(**common, source=single, index=index))
        source = self.in_parts(node, source, dims)
        whole = Reduction(**common, function=function, source=source, dims=dims, keepdim=keepdim)
        if self.is_last(node, whole):
            whole = in_two_steps(whole, self.hint)
        whole = row_by_row(by_rows(whole, self.reduced), self.hint)
        self.reduced.add((tuple(source.sizes), dims))
        return self.converted(node, self.parts.reduction(whole), kind)

    def in_parts(self, node: FxNode, source: Node, dims: Sequence[int]) -> Node:
        """Return what a reduction reduces as put together from its slices, where these are how all
        that is computed from the reduction is read."""
        if node not in self.forward or isinstance(source, Pieces):
            return source
        for dim in dims:
            found = slices_read(node, dim, node.args[0].meta["val"].shape[dim], self.forward)
            regions = list(dict.fromkeys(one for cut in found for one in self.regions_of(cut)[1]))
            regions.sort(key=lambda region: self.hint(region[0]))
            if self.are_equal_parts(regions, source.sizes[dim]):
                values = [
                    self.parts.cut(source, dim, start, length, step)
                    for start, step, length in regions
                ]
                common = {"name": source.name, "sizes": source.sizes, "kind": source.kind}
                return self.parts.joined({**common, "line": source.line}, dim, values)
        return source

    def are_equal_parts(self, regions: Sequence[Region], size: sympy.Expr) -> bool:
        """Return whether regions of a dimension, in order, have one size and fill it."""
        starts = [start for start, _, _ in regions]
        ends = [self.exact(start + length) for start, _, length in regions]
        forms = {(step, length) for _, step, length in regions}
        is_whole = [sympy.Integer(0), *ends] == [*starts, size]
        is_equal = len(forms) == 1 and forms.pop()[0] == 1
        return is_whole and is_equal and 1 < len(regions) <= MOST_REDUCED

    def regions_of(self, node: FxNode) -> tuple[int, list[Region]]:
        """Return the dimension that a node slices or splits, and what it takes of it."""
        arguments = arguments_of(node)
        sizes = self.sizes_of(node.args[0])
        dim = arguments.get("dim", 0) % len(sizes)
        if packet_of(node) is torch.ops.aten.slice:
            start = self.start(node, arguments.get("start"), sizes[dim])
            return dim, [(start, arguments.get("step", 1), self.sizes_of(node)[dim])]
        start, regions = sympy.Integer(0), []
        for part in node.meta["val"]:
            length = self.exact(expression_of(part.shape[dim]))
            regions.append((start, 1, length))
            start = self.exact(start + length)
        return dim, regions

    def start(self, node: FxNode, start: Any, size: sympy.Expr) -> sympy.Expr:
        """Return where a slice begins, counted from the front."""
        if start is None:
            return sympy.Integer(0)
        expression = self.exact(expression_of(number_of(start)))
        hint = self.hint(expression)
        if hint < 0:
            return self.exact(size + expression)
        return size if hint > self.hint(size) else expression

    def is_last(self, node: FxNode, whole: Reduction) -> bool:
        """Return whether no elements are computed from a reduction, and none like it goes over the
        dimensions that this one keeps: such a one has the rows that this one sums over."""
        sizes = whole.source.sizes
        if whole.kept and (tuple(sizes), whole.kept) in self.reduced:
            return False
        seen: set[FxNode] = set()
        stack = list(node.users)
        while stack:
            user = stack.pop()
            value = user.meta.get("val")
            if user in seen or not isinstance(value, Tensor):
                continue
            seen.add(user)
            if self.sizes_of(user) == sizes:
                return False
            stack += user.users
        return True

    def reduced_dims(self, node: FxNode) -> tuple[tuple[int, ...], bool]:
        """Return the dimensions that a reduction goes over, and whether they keep size 1."""
        arguments = arguments_of(node)
        rank = len(self.known[node.args[0]].sizes)
        dims = arguments.get("dim")
        dims = [dims] if isinstance(dims, int) else dims
        found = tuple(sorted(dim % rank for dim in dims)) if dims and rank else tuple(range(rank))
        return found, bool(arguments.get("keepdim", False))

    def converted(self, node: FxNode, source: Node, kind: Kind) -> Node:
        """Return the elements of ``source`` as numbers of another kind."""
        if source.kind == kind:
            return source
        return self.element(
            node, f"{source.name}_as_{kind}", source.sizes, kind, f"to_{kind}", source
        )

    def element(
        self, node: FxNode, label: str, sizes: Sizes, kind: Kind, function: str, *operands: Any
    ) -> Node:
        """Return a scalar function of nodes as a step on the way to ``node``."""
        return self.parts.pointwise(
            Pointwise(label, tuple(sizes), kind, source_line(node), False, function, operands)
        )

    def refuse(self, node: FxNode) -> NoReturn:
        why = "has no generated kernel"
        if has_free_unbacked_symbols(node.meta.get("val")):
            why = "gives a tensor whose size depends on values"
        raise EjectError(
            f"{node.target} {why}{at_line(node)}; eject the parts before and after it."
        )

    def step(
        self, node: FxNode, label: str, function: str, *operands: Any, kind: Kind | None = None
    ) -> Node:
        """Return a scalar function with the sizes of ``node`` as a step on the way to it."""
        common = self.common(node)
        name = f"{common['name']}_{label}"
        return self.element(
            node, name, common["sizes"], kind or common["kind"], function, *operands
        )

    def as_integers(self, node: FxNode, values: Sequence[Node]) -> list[Node]:
        return [self.step(node, "bit", "to_int", value, kind="int") for value in values]

    def as_kind(self, node: FxNode, source: Node) -> Node:
        return self.converted(node, source, kind_of(node.meta["val"].dtype))


def _float32(number: float) -> float:
    return torch.tensor(number, dtype=torch.float32).item()


def as_written(number: Any) -> Any:
    """Return a float that PyTorch has rounded to float32, as it does the eps of an RMS norm, as the
    shortest number that rounds to it: 1e-05 for 9.999999747378752e-06. Others stay."""
    # The largest number has no shorter text that float32 holds.
    is_near = isinstance(number, float) and abs(number) < torch.finfo(torch.float32).max
    if not is_near or _float32(number) != number:
        return number
    return next(
        short
        for digits in range(1, 18)
        for short in [float(f"{number:.{digits}g}")]
        if _float32(short) == number
    )


def kind_of(dtype: torch.dtype) -> Kind:
    """Return the kind of a dtype's numbers. Raises EjectError where kernels have none."""
    if dtype == torch.bool:
        return "bool"
    if dtype.is_floating_point:
        return "float"
    if dtype.is_complex or dtype in _QUANTIZED:
        raise EjectError(f"no kernel computes with {dtype}")
    return "int"


def number_of(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def inserted(dims: Sequence[int]) -> Rearrangement:
    """Return the index map that puts dimensions of size 1 back at ``dims``."""

    def index_of(index: Index, *_: Any) -> Index:
        entries = list(index)
        for dim in sorted(dims):
            entries.insert(dim, ())
        return tuple(entries)

    return index_of
