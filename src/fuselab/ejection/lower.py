"""From ATen operators to the nodes of ``loops.py``.

What is neither pointwise nor a reduction nor a rearrangement becomes a ``Call``, which stays a
PyTorch call between the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import Tensor

from fuselab.ejection.arithmetic import Arithmetic
from fuselab.ejection.calls import at_line, source_line
from fuselab.ejection.capture import Captured, user_name, with_sources
from fuselab.ejection.graph_nodes import FxNode, arguments_of, expression_of
from fuselab.ejection.loops import (
    Along,
    Constant,
    Index,
    Input,
    Node,
    Pointwise,
    Reduction,
    Scan,
    Size,
    View,
)
from fuselab.ejection.parts import regrouped
from fuselab.ejection.steps import kind_of
from fuselab.ejection.stored import constant_of
from fuselab.errors import EjectError
from fuselab.runtime.dropout import last_dropped

aten = torch.ops.aten

# Operators that are one scalar function, by its name in `functions.py`.
_POINTWISE: dict[Any, str] = {
    aten.abs: "abs",
    aten.acos: "acos",
    aten.acosh: "acosh",
    aten.asin: "asin",
    aten.asinh: "asinh",
    aten.atan: "atan",
    aten.atan2: "atan2",
    aten.atanh: "atanh",
    aten.bitwise_left_shift: "shl",
    aten.bitwise_and: "and",
    aten.bitwise_or: "or",
    aten.bitwise_right_shift: "shr",
    aten.bitwise_xor: "xor",
    aten.ceil: "ceil",
    aten.cos: "cos",
    aten.cosh: "cosh",
    aten.true_divide: "div",
    aten.digamma: "digamma",
    aten.eq: "eq",
    aten.erf: "erf",
    aten.erfc: "erfc",
    aten.erfinv: "erfinv",
    aten.exp: "exp",
    aten.exp2: "exp2",
    aten.expm1: "expm1",
    aten.floor: "floor",
    aten.ge: "ge",
    aten.gt: "gt",
    aten.hypot: "hypot",
    aten.isnan: "isnan",
    aten.isinf: "isinf",
    aten.le: "le",
    aten.lgamma: "lgamma",
    aten.log: "log",
    aten.log10: "log10",
    aten.log1p: "log1p",
    aten.log2: "log2",
    aten.lt: "lt",
    aten.maximum: "maximum",
    aten.minimum: "minimum",
    aten.mul: "mul",
    aten.ne: "ne",
    aten.neg: "neg",
    aten.reciprocal: "reciprocal",
    aten.rsqrt: "rsqrt",
    aten.sgn: "sign",
    aten.sigmoid: "sigmoid",
    aten.sign: "sign",
    aten.sin: "sin",
    aten.sinh: "sinh",
    aten.sqrt: "sqrt",
    aten.tan: "tan",
    aten.tanh: "tanh",
    aten.where: "where",
}
# The same for numbers that are computed from sizes.
SCALAR_ARITHMETIC: dict[Any, str] = {
    operator.add: "add",
    operator.mul: "mul",
    operator.neg: "neg",
    operator.sub: "sub",
    operator.truediv: "div",
    torch.sym_max: "maximum",
    torch.sym_min: "minimum",
}
_SUMS = {aten.sum: "sum", aten.amax: "amax", aten.amin: "amin", aten.prod: "prod"}
MOST_NUMBERS = 8  # of a tensor that a kernel makes, which compares positions for each
_SAME = (aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy, aten.contiguous)


@dataclass(frozen=True)
class Program:
    """The graph as nodes: arguments and upstream gradients, the outputs and the gradients."""

    inputs: tuple[Input, ...]
    upstream: tuple[Input, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]
    conditions: tuple[sympy.Expr, ...]  # sizes that must not be negative
    divisions: Set[tuple[sympy.Expr, sympy.Expr]]  # sizes that numbers have to divide
    lowered: Mapping[FxNode, Any]  # what each node of the captured graph has become
    integers: Mapping[str, torch.dtype]  # arguments whose integers are computed with in this dtype

    @property
    def results(self) -> tuple[Node, ...]:
        return (*self.outputs, *(one for one in self.gradients if one is not None))


def lower(
    captured: Captured,
    upstream: Sequence[str] = ("grad_output",),
    kind: type[Lowering] | None = None,
) -> Program:
    """Return the captured graph as nodes; ``upstream`` names the upstream gradients, and ``kind``
    is a lowering that knows more operators."""
    lowering = (kind or Lowering)(captured.hints, captured.equal)
    for argument in captured.arguments:
        lowering.known[argument.node] = lowering.input(argument.node, argument.name)
        lowering.integers.argument(argument.node, argument.name)
    for node, name in zip(captured.upstream, upstream, strict=False):
        lowering.known[node] = lowering.input(node, name)
    lowering.forward = with_sources(captured.outputs)
    wanted = lowering.forward | captured.behind_gradients()
    for node in captured.graph.nodes:
        if node in wanted and node.op == "call_function" and node not in lowering.known:
            lowering.known[node] = lowering.in_range(node)
        elif node in wanted and node.op == "get_attr":
            lowering.known[node] = lowering.held_numbers(node)
    known = lowering.known
    return Program(
        tuple(known[argument.node] for argument in captured.arguments),
        tuple(known[node] for node in captured.upstream),
        tuple(known[node] for node in captured.outputs),
        tuple(None if node is None else known[node] for node in captured.gradients),
        tuple(lowering.parts.conditions),
        lowering.parts.divisions,
        known,
        lowering.integers.arguments,
    )


def has_lowering(packet: Any) -> bool:
    """Return whether ``lower`` knows an ATen operator, given without its overload."""
    known = packet in _POINTWISE or packet in _SUMS or packet in _SAME
    return known or hasattr(Lowering, f"op_{_short(packet)}")


def constant_tensor(node: FxNode) -> Tensor:
    """Return the tensor behind a ``get_attr`` node."""
    held: Tensor = getattr(node.graph.owning_module, str(node.target))
    return held


class Lowering(Arithmetic):
    """Makes the node of each operator of a graph, in the graph's order."""

    def input(self, node: FxNode, name: str) -> Input:
        value: Tensor = node.meta["val"]
        return Input(name, self.sizes_of(node), kind_of(value.dtype))

    def in_range(self, node: FxNode) -> Any:
        """Return what a node becomes; integers wrap around as those of its dtype do."""
        widened = self.integers.widened(node)
        before = {one: self.known[one] for one in widened}
        for one, value in before.items():
            if constant_of(value) is None:
                self.known[one] = self.element(one, value.name, value.sizes, "int", "to_int", value)
        found = self.lower(node)
        self.known |= before
        function = self.integers.conversion(node)
        if function is None or constant_of(found) is not None:
            return found
        return self.pointwise(node, function, (found,))

    def lower(self, node: FxNode) -> Any:
        target: Any = node.target
        value = node.meta.get("val")
        if target is operator.getitem:
            return self.known[node.args[0]][node.args[1]]
        if isinstance(value, (torch.SymFloat, float)):
            return self.number_from_sizes(node)
        if isinstance(value, (torch.SymInt, int)):
            return Size(expression_of(value))
        packet = getattr(target, "overloadpacket", target)
        if packet in _POINTWISE:
            return self.pointwise(node, _POINTWISE[packet], self.values(node.args))
        if packet in _SUMS:
            return self.reduction(node, _SUMS[packet])
        if packet in _SAME:
            return self.known[node.args[0]]
        handler: Callable[[FxNode], Any] | None = getattr(self, f"op_{_short(packet)}", None)
        if handler is None:
            self.refuse(node)
        return handler(node)

    def held_numbers(self, node: FxNode) -> Node:
        """Return a tensor that the function makes of Python numbers: each element is chosen from
        them by its position."""
        held = constant_tensor(node)
        long = [dim for dim, size in enumerate(held.shape) if size != 1]
        if not 1 <= held.numel() <= MOST_NUMBERS or len(long) > 1:
            raise EjectError(
                f"a constant tensor of {held.numel()} elements has no place in a kernel"
                f"{at_line(node)}; make it an argument."
            )
        kind, sizes = kind_of(held.dtype), tuple(map(expression_of, held.shape))
        *others, last = held.flatten().tolist()
        value = self.element(node, "number", sizes, kind, "same", Constant(last))
        for place, number in reversed(list(enumerate(others))):
            along = self.along(node, sizes, long[0])
            is_it = self.element(node, "is_it", sizes, "bool", "eq", along, Constant(place))
            value = self.element(
                node, "number", sizes, kind, "where", is_it, Constant(number), value
            )
        return value

    def number_from_sizes(self, node: FxNode) -> Any:
        """Return a fractional number that is computed from sizes, such as the N - 1 of a standard
        deviation."""
        target: Any = node.target
        if target is torch.sym_float:
            return self.value(node.args[0])
        if target not in SCALAR_ARITHMETIC:
            self.refuse(node)
        return Pointwise(
            user_name(node),
            (),
            "float",
            source_line(node),
            function=SCALAR_ARITHMETIC[target],
            operands=self.values(node.args),
        )

    def op_kept(self, node: FxNode) -> Node:
        """Return the mask of a dropout: a function of the seed and of the position in it."""
        seed, number, _, p = node.args
        common = self.common(node)
        along = (sympy.Mul(*common["sizes"]),)
        position = Along("position", along, "int", common["line"], False, 0)
        place = View("position", common["sizes"], "int", common["line"], False, position, regrouped)
        last = Constant(last_dropped(p))
        return self.pointwise(node, "kept", (self.known[seed], place, Constant(number), last))

    # --- reductions that are no sum

    def op_any(self, node: FxNode) -> Node:
        return self.counted(node, "gt", is_inverted=False)

    def op_all(self, node: FxNode) -> Node:
        return self.counted(node, "eq", is_inverted=True)

    def counted(self, node: FxNode, comparison: str, is_inverted: bool) -> Node:
        """Return how the number of true elements, or of false ones, compares with 0."""
        value = self.converted(node, self.known[node.args[0]], "bool")
        if is_inverted:
            value = self.element(node, "is_false", value.sizes, "bool", "not", value)
        dims, keepdim = self.reduced_dims(node)
        count = self.converted(node, value, "int")
        if dims:
            common = {**self.common(node), "kind": "int", "name": "count", "is_named": False}
            count = self.parts.reduction(
                Reduction(**common, function="sum", source=count, dims=dims, keepdim=keepdim)
            )
        return self.pointwise(node, comparison, (count, Constant(0)))

    def op_argmax(self, node: FxNode) -> Node:
        return self.place_of(node, "amax")

    def op_argmin(self, node: FxNode) -> Node:
        return self.place_of(node, "amin")

    def op_max(self, node: FxNode) -> Any:
        return self.extreme(node, "amax", "maximum")

    def op_min(self, node: FxNode) -> Any:
        return self.extreme(node, "amin", "minimum")

    def extreme(self, node: FxNode, function: str, of_two: str) -> Any:
        """Return the largest or smallest element, with its position where a dimension is given."""
        arguments = arguments_of(node)
        if "other" in arguments:
            return self.pointwise(node, of_two, self.values(node.args))
        if "dim" not in arguments:
            return self.reduction(node, function)
        value, place = node.meta["val"]
        parts = []
        for one, tensor in (("value", value), ("place", place)):
            part = _Part(node, one, tensor)
            parts.append(
                self.reduction(part, function) if one == "value" else self.place_of(part, function)
            )
        return tuple(parts)

    def place_of(self, node: FxNode, function: str) -> Node:
        """Return the least position of the largest or smallest element; the first NaN's, if there
        is one."""
        source: Node = self.known[node.args[0]]
        if source.kind == "bool":
            source = self.converted(node, source, "int")
        arguments = arguments_of(node)
        common = {**self.common(node), "is_named": False}
        keepdim = bool(arguments.get("keepdim", False))
        dim = arguments.get("dim")
        if dim is None or not source.sizes:
            numel = (sympy.prod(list(source.sizes)),)
            source = View(source.name, numel, source.kind, common["line"], False, source, regrouped)
            dim, keepdim = 0, False
        dim %= len(source.sizes)
        kept = tuple(
            sympy.Integer(1) if one == dim else size for one, size in enumerate(source.sizes)
        )
        extreme = self.parts.reduction(Reduction(
            f"{common['name']}_value", kept, source.kind, common["line"], False, function, source,
            (dim,), True,
        ))  # fmt: skip
        is_it = self.element(node, "is_it", source.sizes, "bool", "eq", source, extreme)
        if source.kind == "float":
            is_nan = self.element(node, "is_nan", source.sizes, "bool", "isnan", source)
            is_it = self.element(node, "is_it", source.sizes, "bool", "or", is_it, is_nan)
        position = Along("position", source.sizes, "int", common["line"], False, dim)
        behind = Size(source.sizes[dim])
        place = self.element(node, "place", source.sizes, "int", "where", is_it, position, behind)
        return self.parts.reduction(Reduction(
            **common, function="amin", source=place, dims=(dim,), keepdim=keepdim,
            places=source.sizes[dim],
        ))  # fmt: skip

    # --- products that read no element twice

    def op_mm(self, node: FxNode) -> Node:
        return self.product_of_matrices(node)

    def op_bmm(self, node: FxNode) -> Node:
        return self.product_of_matrices(node)

    def product_of_matrices(self, node: FxNode) -> Node:
        """Return a product of matrices of which one has one row, or one column, as the products of
        rows are that ``einsum`` makes: a sum of products. Others are a library's."""
        one, other = (self.known[argument] for argument in node.args[:2])
        *batch, rows, shared = one.sizes
        columns = other.sizes[-1]
        if 1 not in (rows, shared, columns):
            self.refuse(node)
        common = self.common(node)
        wide = (*batch, rows, columns, shared)

        def of_rows(at: Index, *_: Any) -> Index:
            return (*at[:-2], at[-1])

        def of_columns(at: Index, *_: Any) -> Index:
            return (*at[:-3], at[-1], at[-2])

        factors = [
            View(matrix.name, wide, matrix.kind, common["line"], False, matrix, index)
            for matrix, index in ((one, of_rows), (other, of_columns))
        ]
        product = self.element(node, "product", wide, one.kind, "mul", *factors)
        last = len(wide) - 1
        return Reduction(**common, function="sum", source=product, dims=(last,), keepdim=False)

    # --- running reductions

    def op_cumsum(self, node: FxNode) -> Node:
        return self.scan(node, "sum", self.as_kind(node, self.known[node.args[0]]))

    def op_cumprod(self, node: FxNode) -> Node:
        return self.scan(node, "prod", self.as_kind(node, self.known[node.args[0]]))

    def scan(self, node: FxNode, function: str, source: Node) -> Node:
        """Return the reductions up to each element along a dimension."""
        common = {**self.common(node), "sizes": source.sizes, "kind": source.kind}
        if not source.sizes or source.sizes[node.args[1]] == 1:
            return self.pointwise(node, "same", (source,))
        dim = node.args[1] % len(source.sizes)
        return Scan(**common, function=function, source=source, dim=dim)

    def op_cummax(self, node: FxNode) -> tuple[Node, Node]:
        return self.extreme_so_far(node, "amax")

    def op_cummin(self, node: FxNode) -> tuple[Node, Node]:
        return self.extreme_so_far(node, "amin")

    def extreme_so_far(self, node: FxNode, function: str) -> tuple[Node, Node]:
        """Return the largest or smallest element so far, and where the last of them is: the largest
        position so far at which the element is the extreme one."""
        source: Node = self.known[node.args[0]]
        labels = zip(("value", "place"), node.meta["val"], strict=True)
        value, place = (_Part(node, *one) for one in labels)
        extreme = self.scan(value, function, source)
        if not source.sizes:
            return extreme, self.pointwise(place, "same", (Constant(0),))
        dim = node.args[1] % len(source.sizes)
        is_it = self.element(node, "is_it", source.sizes, "bool", "eq", source, extreme)
        if source.kind == "float":
            is_nan = self.element(node, "is_nan", source.sizes, "bool", "isnan", source)
            is_it = self.element(node, "is_it", source.sizes, "bool", "or", is_it, is_nan)
        position = Along("position", source.sizes, "int", source_line(node), False, dim)
        none = Constant(0)
        places = self.element(node, "place", source.sizes, "int", "where", is_it, position, none)
        return extreme, self.scan(place, "amax", places)

    def op_logcumsumexp(self, node: FxNode) -> Node:
        source: Node = self.known[node.args[0]]
        return self.call(node, "torch.logcumsumexp({0}, {1})", source, node.args[1])

    # --- elements chosen by an index

    def op_gather(self, node: FxNode) -> Node:
        """Return the sum over the dimension of the elements whose position is the index."""
        source, index = self.known[node.args[0]], self.known[node.args[2]]
        if not source.sizes:
            return self.pointwise(node, "same", (source,))
        if index.sizes[node.args[1] % len(source.sizes)] != 1:
            return self.chosen_along(node)
        common = self.common(node)
        dim, sizes = node.args[1] % len(source.sizes), index.sizes
        wide = (*sizes, source.sizes[dim])

        def along_last(at: Index, *_: Any) -> Index:
            return (*at[:dim], at[-1], *at[dim + 1 : -1])

        candidates = View(source.name, wide, source.kind, common["line"], False, source, along_last)
        wanted = View(
            index.name, (*sizes, sympy.Integer(1)), "int", common["line"], False, index,
            lambda at, *_: at[:-1],
        )  # fmt: skip
        place = Along("place", wide, "int", common["line"], False, len(sizes))
        is_it = self.element(node, "is_it", wide, "bool", "eq", place, wanted)
        zero = Constant(0.0 if source.kind == "float" else 0)
        chosen = self.element(node, "chosen", wide, source.kind, "where", is_it, candidates, zero)
        return Reduction(**common, function="sum", source=chosen, dims=(len(sizes),), keepdim=False)

    def op_scatter(self, node: FxNode) -> Node:
        return self.scattered(node, is_sum=False)

    def op_scatter_add(self, node: FxNode) -> Node:
        return self.scattered(node, is_sum=True)

    def scattered(self, node: FxNode, is_sum: bool) -> Node:
        """Return the tensor with elements replaced, or added to: by a comparison of positions where
        it is one of each row."""
        target, index = self.known[node.args[0]], self.known[node.args[2]]
        if "reduce" in node.kwargs or not target.sizes:
            self.refuse(node)
        dim = node.args[1] % len(target.sizes)
        value = self.value(node.args[3])
        others = [size for one, size in enumerate(target.sizes) if one != dim]
        if (
            index.sizes[dim] != 1
            or others != [size for one, size in enumerate(index.sizes) if one != dim]
            or (isinstance(value, Node) and value.sizes != index.sizes)
        ):
            return self.scattered_anywhere(node, "scatter_add_" if is_sum else "scatter_")
        place = Along("place", target.sizes, "int", source_line(node), False, dim)
        is_it = self.element(node, "is_it", target.sizes, "bool", "eq", place, index)
        if is_sum:
            value = self.step(node, "sum", "add", target, value)
        return self.pointwise(node, "where", (is_it, value, target))


@dataclass(frozen=True)
class _Part:
    """One of the tensors that a node returns, as a node of its own."""

    node: FxNode
    label: str
    value: Tensor

    @property
    def meta(self) -> dict[str, Any]:
        return {**self.node.meta, "val": self.value}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)


def _short(packet: Any) -> str:
    return str(getattr(packet, "__name__", packet))
