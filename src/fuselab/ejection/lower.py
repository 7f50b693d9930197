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

from fuselab.ejection.capture import Captured, source_line, user_name, with_sources
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
    Splitter,
    View,
)
from fuselab.ejection.parts import regrouped, unexpanded
from fuselab.ejection.steps import (
    FxNode,
    Sizes,
    arguments_of,
    at_line,
    expression_of,
    inserted,
    kind_of,
    number_of,
)
from fuselab.ejection.two_steps import in_two_steps
from fuselab.ejection.windows import Pooling
from fuselab.errors import EjectError

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
    aten.eq: "eq",
    aten.erf: "erf",
    aten.erfc: "erfc",
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
    aten.relu: "relu",
    aten.round: "round",
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
# Powers that PyTorch computes by a simpler function.
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "same"}
INFINITY = Constant(float("inf"))
_SAME = (aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy, aten.contiguous)


@dataclass(frozen=True)
class Program:
    """The graph as nodes: arguments and upstream gradients, the outputs and the gradients."""

    inputs: tuple[Input, ...]
    upstream: tuple[Input, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]
    conditions: Mapping[sympy.Expr, str]  # sizes that must not be negative, each with its line
    divisions: Set[tuple[sympy.Expr, sympy.Expr]]  # sizes that numbers have to divide

    @property
    def results(self) -> tuple[Node, ...]:
        return (*self.outputs, *(one for one in self.gradients if one is not None))


def lower(captured: Captured, upstream: Sequence[str] = ("grad_output",)) -> Program:
    """Return the captured graph as nodes; ``upstream`` names the upstream gradients."""
    lowering = _Lowering(captured.hints, captured.equal)
    for argument in captured.arguments:
        lowering.known[argument.node] = lowering.input(argument.node, argument.name)
    for node, name in zip(captured.upstream, upstream, strict=False):
        lowering.known[node] = lowering.input(node, name)
    wanted = with_sources(captured.outputs) | captured.behind_gradients()
    for node in captured.graph.nodes:
        if node in wanted and node.op == "call_function" and node not in lowering.known:
            lowering.known[node] = lowering.lower(node)
        elif node in wanted and node.op == "get_attr":
            lowering.known[node] = lowering.held_number(node)
    known = lowering.known
    return Program(
        tuple(known[argument.node] for argument in captured.arguments),
        tuple(known[node] for node in captured.upstream),
        tuple(known[node] for node in captured.outputs),
        tuple(None if node is None else known[node] for node in captured.gradients),
        lowering.parts.conditions,
        lowering.parts.divisions,
    )


def has_lowering(packet: Any) -> bool:
    """Return whether ``lower`` knows an ATen operator, given without its overload."""
    known = packet in _POINTWISE or packet in _SUMS or packet in _SAME
    return known or hasattr(_Lowering, f"op_{_short(packet)}")


def constant_tensor(node: FxNode) -> Tensor:
    """Return the tensor behind a ``get_attr`` node."""
    held: Tensor = getattr(node.graph.owning_module, str(node.target))
    return held


class _Lowering(Pooling):
    def input(self, node: FxNode, name: str) -> Input:
        value: Tensor = node.meta["val"]
        return Input(name, self.sizes_of(node), kind_of(value.dtype))

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

    def held_number(self, node: FxNode) -> Node:
        """Return a tensor that the function makes of a Python number."""
        held = constant_tensor(node)
        if held.numel() != 1:
            raise EjectError(
                f"a constant tensor of {held.numel()} elements has no place in a kernel"
                f"{at_line(node)}; make it an argument."
            )
        value = Constant(held.item())
        sizes = tuple(map(expression_of, held.shape))
        return Pointwise(
            "number", sizes, kind_of(held.dtype), source_line(node), False, "same", (value,)
        )

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

    # --- operators by name

    def op_add(self, node: FxNode) -> Node:
        return self.sum_of(node, "add")

    def op_sub(self, node: FxNode) -> Node:
        return self.sum_of(node, "sub")

    def sum_of(self, node: FxNode, function: str) -> Node:
        first, second = self.values(node.args[:2])
        factor = node.kwargs.get("alpha", node.args[2] if len(node.args) > 2 else 1)
        if factor != 1:
            common = self.common(node)
            common["sizes"] = second.sizes if isinstance(second, Node) else ()
            second = Pointwise(**common, function="mul", operands=(second, Constant(factor)))
        return self.pointwise(node, function, (first, second))

    def op_clamp(self, node: FxNode) -> Node:
        value: Node = self.known[node.args[0]]
        lower, upper = [*node.args[1:], None, None][:2]
        if lower is not None:
            value = self.pointwise(node, "maximum", (value, self.value(lower)))
        if upper is not None:
            value = self.pointwise(node, "minimum", (value, self.value(upper)))
        return value

    def op_clamp_min(self, node: FxNode) -> Node:
        return self.pointwise(node, "maximum", self.values(node.args))

    def op_clamp_max(self, node: FxNode) -> Node:
        return self.pointwise(node, "minimum", self.values(node.args))

    def op_pow(self, node: FxNode) -> Node:
        base, exponent = self.values(node.args[:2])
        power = exponent.value if isinstance(exponent, Constant) else None
        if not isinstance(base, Node) or base.kind != "float":
            power = None
        if power in _POWERS:
            return self.pointwise(node, _POWERS[power], (base,))
        if power == 2:
            return self.pointwise(node, "mul", (base, base))
        if power == 3:
            common = {**self.common(node), "is_named": False}
            square = Pointwise(**common, function="mul", operands=(base, base))
            return self.pointwise(node, "mul", (square, base))
        return self.pointwise(node, "pow", (base, exponent))

    def op_div(self, node: FxNode) -> Node:
        rounding = node.kwargs.get("rounding_mode")
        if rounding is None:
            return self.pointwise(node, "div", self.values(node.args))
        if rounding == "floor":
            return self.op_floor_divide(node)
        one, other = self.values(node.args)
        if node.meta["val"].dtype.is_floating_point:
            return self.pointwise(node, "trunc", (self.step(node, "quotient", "div", one, other),))
        return self.whole_quotient(node, one, other)

    def whole_quotient(self, node: FxNode, one: Any, other: Any) -> Node:
        """Return the quotient of integers, rounded to zero. A divisor 0, at which a processor
        stops, is taken as 1; PyTorch raises an error for it or returns anything."""
        is_zero = self.step(node, "is_zero", "eq", other, Constant(0), kind="bool")
        divisor = self.step(node, "divisor", "where", is_zero, Constant(1), other)
        parts = [self.step(node, "magnitude", "abs", value) for value in (one, divisor)]
        quotient = self.step(node, "quotient", "intdiv", *parts)
        signs = [
            self.step(node, "sign", "lt", value, Constant(0), kind="bool")
            for value in (one, divisor)
        ]
        differ = self.step(node, "differ", "ne", *self.as_integers(node, signs), kind="bool")
        return self.step(
            node, "whole", "where", differ, self.step(node, "", "neg", quotient), quotient
        )

    def op_floor_divide(self, node: FxNode) -> Node:
        one, other = self.values(node.args[:2])
        remainder = self.remainder(node, one, other)
        difference = self.step(node, "difference", "sub", one, remainder)
        if not node.meta["val"].dtype.is_floating_point:
            return self.whole_quotient(node, difference, other)
        return self.pointwise(
            node, "round", (self.step(node, "quotient", "div", difference, other),)
        )

    def op_remainder(self, node: FxNode) -> Node:
        return self.remainder(node, *self.values(node.args[:2]))

    def op_fmod(self, node: FxNode) -> Node:
        one, other = self.values(node.args[:2])
        if node.meta["val"].dtype.is_floating_point:
            return self.pointwise(node, "fmod", (one, other))
        product = self.step(node, "product", "mul", self.whole_quotient(node, one, other), other)
        return self.pointwise(node, "sub", (one, product))

    def remainder(self, node: FxNode, one: Any, other: Any) -> Node:
        """Return the remainder with the sign of the divisor."""
        if node.meta["val"].dtype.is_floating_point:
            rest = self.step(node, "rest", "fmod", one, other)
        else:
            product = self.step(
                node, "product", "mul", self.whole_quotient(node, one, other), other
            )
            rest = self.step(node, "rest", "sub", one, product)
        product = self.step(node, "sign", "mul", self.sign(node, rest), self.sign(node, other))
        differ = self.step(node, "differ", "lt", product, Constant(0), kind="bool")
        return self.step(
            node, "remainder", "where", differ, self.step(node, "sum", "add", rest, other), rest
        )

    def sign(self, node: FxNode, value: Any) -> Node:
        """Return -1, 0 or 1."""
        positive = self.step(node, "positive", "gt", value, Constant(0), kind="bool")
        negative = self.step(node, "negative", "lt", value, Constant(0), kind="bool")
        return self.step(
            node, "sign", "sub", *self.as_integers(node, [positive, negative]), kind="int"
        )

    def op_trunc(self, node: FxNode) -> Node:
        (value,) = self.values(node.args)
        if not node.meta["val"].dtype.is_floating_point:
            return self.pointwise(node, "same", (value,))
        return self.pointwise(node, "trunc", (value,))

    op_fix = op_trunc

    def op_frac(self, node: FxNode) -> Node:
        (value,) = self.values(node.args)
        return self.pointwise(node, "sub", (value, self.step(node, "whole", "trunc", value)))

    def logical(self, node: FxNode, function: str) -> Node:
        """Return a function of truth values; numbers are true where they are not 0."""
        values = [
            self.converted(node, value, "bool") if isinstance(value, Node) else value
            for value in self.values(node.args)
        ]
        return self.pointwise(node, function, tuple(values))

    def op_logical_and(self, node: FxNode) -> Node:
        return self.logical(node, "and")

    def op_logical_or(self, node: FxNode) -> Node:
        return self.logical(node, "or")

    def op_logical_xor(self, node: FxNode) -> Node:
        return self.logical(node, "xor")

    def op_logical_not(self, node: FxNode) -> Node:
        return self.logical(node, "not")

    def op_isfinite(self, node: FxNode) -> Node:
        (value,) = self.values(node.args)
        if value.kind != "float":
            return self.pointwise(node, "same", (Constant(True),))
        return self.pointwise(
            node,
            "lt",
            (self.element(node, "magnitude", value.sizes, "float", "abs", value), INFINITY),
        )

    def op_isposinf(self, node: FxNode) -> Node:
        return self.pointwise(node, "eq", (*self.values(node.args), INFINITY))

    def op_isneginf(self, node: FxNode) -> Node:
        return self.pointwise(node, "eq", (*self.values(node.args), Constant(float("-inf"))))

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
            count = Reduction(**common, function="sum", source=count, dims=dims, keepdim=keepdim)
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
        extreme = Reduction(
            f"{common['name']}_value", kept, source.kind, common["line"], False, function, source,
            (dim,), True,
        )  # fmt: skip
        is_it = self.element(node, "is_it", source.sizes, "bool", "eq", source, extreme)
        if source.kind == "float":
            is_nan = self.element(node, "is_nan", source.sizes, "bool", "isnan", source)
            is_it = self.element(node, "is_it", source.sizes, "bool", "or", is_it, is_nan)
        position = Along("position", source.sizes, "int", common["line"], False, dim)
        behind = Size(source.sizes[dim])
        place = self.element(node, "place", source.sizes, "int", "where", is_it, position, behind)
        return Reduction(**common, function="amin", source=place, dims=(dim,), keepdim=keepdim)

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

    def op_copy(self, node: FxNode) -> Node:
        """Return the values that a tensor is overwritten with."""
        return self.pointwise(node, "same", (self.as_kind(node, self.known[node.args[1]]),))

    def op___lshift__(self, node: FxNode) -> Node:
        return self.pointwise(node, "shl", self.values(node.args))

    def op___rshift__(self, node: FxNode) -> Node:
        return self.pointwise(node, "shr", self.values(node.args))

    def op_fmax(self, node: FxNode) -> Node:
        return self.number_of_two(node, "maximum")

    def op_fmin(self, node: FxNode) -> Node:
        return self.number_of_two(node, "minimum")

    def number_of_two(self, node: FxNode, function: str) -> Node:
        """Return the larger or smaller of two values, the other one where one is NaN."""
        one, other = self.values(node.args)
        for value, instead in ((one, other), (other, one)):
            is_nan = self.step(node, "is_nan", "isnan", value, kind="bool")
            chosen = self.step(node, "chosen", "where", is_nan, instead, value)
            one, other = (chosen, other) if value is one else (one, chosen)
        return self.pointwise(node, function, (one, other))

    # --- constants

    def op_scalar_tensor(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", self.values(node.args[:1]))

    def op_full(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", self.values(node.args[1:2]))

    def op_full_like(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", self.values(node.args[1:2]))

    def op_zeros_like(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", (Constant(0),))

    def op_ones_like(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", (Constant(1),))

    op_zeros = op_new_zeros = op_zeros_like
    op_empty_like = op_empty = op_new_empty = op_new_empty_strided = (
        op_zeros_like  # any values are right
    )
    op_ones = op_new_ones = op_ones_like

    def op_new_full(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", self.values(node.args[2:3]))

    def op_bitwise_not(self, node: FxNode) -> Node:
        is_bool = node.meta["val"].dtype == torch.bool
        return self.pointwise(node, "not" if is_bool else "invert", self.values(node.args))

    def op_arange(self, node: FxNode) -> Node:
        arguments = arguments_of(node)
        start, step = (
            self.value(arguments.get(key, at)) for key, at in (("start", 0), ("step", 1))
        )
        common = self.common(node)
        place: Node = Along(f"{common['name']}_place", common["sizes"], "int", common["line"])
        if step != Constant(1):
            place = self.step(node, "scaled", "mul", self.as_kind(node, place), step)
        if start != Constant(0):
            place = self.step(node, "shifted", "add", self.as_kind(node, place), start)
        return self.pointwise(node, "same", (self.as_kind(node, place),))

    op_iota = op_arange

    def op_fill(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", self.values(node.args[1:2]))

    def op_convert_element_type(self, node: FxNode) -> Node:
        return self.cast(node, self.known[node.args[0]])

    def op__to_copy(self, node: FxNode) -> Node:
        return self.cast(node, self.known[node.args[0]])

    def cast(self, node: FxNode, source: Node) -> Node:
        kind = kind_of(node.meta["val"].dtype)
        if kind == source.kind:
            return source
        return self.pointwise(node, f"to_{kind}", (source,))

    def op_mean(self, node: FxNode) -> Node:
        dims, _ = self.reduced_dims(node)
        count = self.count(self.known[node.args[0]], dims)
        return self.pointwise(node, "div", (self.reduction(node, "sum"), count))

    def count(self, source: Node, dims: Sequence[int]) -> Any:
        """Return the number of elements that a sum over ``dims`` sums up."""
        return Size(sympy.prod([source.sizes[dim] for dim in dims])) if dims else Constant(1)

    def op_var_mean(self, node: FxNode) -> tuple[Node, Node]:
        variance, mean = self.moments(node)
        return variance, mean

    def op_var(self, node: FxNode) -> Node:
        return self.moments(node)[0]

    def moments(self, node: FxNode) -> tuple[Node, Node]:
        """Return variance and mean: the mean of the squared deviations from the mean."""
        source = self.known[node.args[0]]
        arguments = arguments_of(node)
        rank = len(source.sizes)
        dims = arguments.get("dim")
        dims = tuple(sorted(dim % rank for dim in dims)) if dims else tuple(range(rank))
        keepdim = bool(arguments.get("keepdim", False))
        correction = arguments.get("correction", 1)
        correction = 1 if correction is None else correction
        variance, mean = self.moments_of(node, source, dims, correction)
        if keepdim:
            return variance, mean
        dropped = tuple(size for dim, size in enumerate(source.sizes) if dim not in dims)

        def squeezed(of: Node) -> Node:
            return View(of.name, dropped, "float", of.line, False, of, inserted(dims))

        return squeezed(variance), squeezed(mean)

    def moments_of(
        self, node: FxNode, source: Node, dims: tuple[int, ...], correction: float
    ) -> tuple[Node, Node]:
        """Return variance and mean over ``dims``, which keep size 1."""
        name, line = user_name(node), source_line(node)
        kept = tuple(
            sympy.Integer(1) if dim in dims else size for dim, size in enumerate(source.sizes)
        )

        def total(of: Node, label: str) -> Reduction:
            return Reduction(f"{name}_{label}", kept, "float", line, False, "sum", of, dims, True)

        def element(label: str, sizes: Any, function: str, *operands: Any) -> Node:
            label = f"{name}_{label}"
            return Pointwise(label, sizes, "float", line, False, function, operands)

        self.reduced.add((tuple(source.sizes), dims))
        sums = total(source, "total")
        count = self.count(source, dims)
        mean = element("mean", kept, "div", sums, count)
        deviation = element("deviation", source.sizes, "sub", source, mean)
        square = element("square", source.sizes, "mul", deviation, deviation)
        divisor: Any = count
        if correction:
            degrees = element("degrees", (), "sub", count, Constant(correction))
            divisor = element("degrees", (), "maximum", degrees, Constant(0))
        return element("variance", kept, "div", total(square, "squares"), divisor), mean

    def op_native_group_norm(self, node: FxNode) -> tuple[Node, Node, Node]:
        source, weight, bias = (arg and self.known[arg] for arg in node.args[:3])
        batch, channels, area, _, eps = self.values(node.args[3:8])
        groups = expression_of(number_of(node.args[6]))
        batch, channels, area = (expression_of(number_of(arg)) for arg in node.args[3:6])
        name, line = user_name(node), source_line(node)
        sizes = batch, groups, quotient_of(channels, groups) * area

        def element(label: str, of: Any, function: str, *operands: Any) -> Node:
            return Pointwise(f"{name}{label}", of, "float", line, False, function, operands)

        def rearranged(of: Node, into: tuple[sympy.Expr, ...]) -> Node:
            return View(of.name, into, "float", line, False, of, regrouped)

        grouped = rearranged(source, sizes)
        variance, mean = self.moments_of(node, grouped, (2,), 0)
        rstd = element(
            "_rstd", mean.sizes, "rsqrt", element("_shifted", mean.sizes, "add", variance, eps)
        )
        centred = element("_centred", sizes, "sub", grouped, mean)
        result = rearranged(element("_scaled", sizes, "mul", centred, rstd), source.sizes)
        spread = (sympy.Integer(1), channels, *[sympy.Integer(1)] * (len(source.sizes) - 2))
        for function, factor in (("mul", weight), ("add", bias)):
            if factor is not None:
                along = View(
                    factor.name, spread, "float", line, False, factor, lambda index, *_: (index[1],)
                )
                result = element("", source.sizes, function, result, along)

        def squeezed(of: Node) -> Node:
            return View(of.name, sizes[:2], "float", line, False, of, inserted((2,)))

        return result, squeezed(mean), squeezed(rstd)

    def op_native_group_norm_backward(self, node: FxNode) -> tuple[Node | None, ...]:
        """Return the gradients of the input, of the weight and of the bias.

        With y the input normalised, d the upstream gradient times the weight and means over a
        group, the input's gradient is rstd (d - mean(d) - y mean(d y)).
        """
        upstream, source, mean, rstd, weight = (arg and self.known[arg] for arg in node.args[:5])
        batch, channels, area, groups = (expression_of(number_of(arg)) for arg in node.args[5:9])
        name, line = user_name(node), source_line(node)
        # Of no elements the mean is NaN, and so is eager's gradient of the weight.
        self.parts.require(area - 1, line)
        one = sympy.Integer(1)
        sizes = batch, groups, quotient_of(channels, groups) * area
        flat = batch, channels, area

        def element(label: str, of: Sizes, function: str, *operands: Any) -> Node:
            return self.element(node, f"{name}_{label}", of, "float", function, *operands)

        def rearranged(of: Node, into: Sizes) -> Node:
            return self.parts.view(View(of.name, tuple(into), of.kind, line, False, of, regrouped))

        def total(
            label: str, of: Node, dims: tuple[int, ...], into: Sizes, keepdim: bool
        ) -> Reduction:
            return Reduction(
                f"{name}_{label}", tuple(into), "float", line, False, "sum", of, dims, keepdim
            )

        def spread(of: Node) -> Node:
            return View(
                of.name, (*of.sizes, one), "float", line, False, of, lambda index, *_: index[:-1]
            )

        rstd, mean = spread(rstd), spread(mean)
        centred = element("centred", sizes, "sub", rearranged(source, sizes), mean)
        normalised = element("normalised", sizes, "mul", centred, rstd)
        scaled = upstream
        if weight is not None:
            shape = (channels, *[one] * (len(source.sizes) - 2))
            along = View(
                weight.name, shape, "float", line, False, weight, lambda index, *_: index[:1]
            )
            scaled = element("scaled", source.sizes, "mul", upstream, along)
        scaled = rearranged(scaled, sizes)
        kept = (*sizes[:2], one)
        count = Size(sizes[2])
        first = element(
            "mean_of_scaled", kept, "div", total("scaled_sum", scaled, (2,), kept, True), count
        )
        product = element("product", sizes, "mul", scaled, normalised)
        second = element(
            "mean_of_product", kept, "div", total("product_sum", product, (2,), kept, True), count
        )
        difference = element("difference", sizes, "sub", scaled, first)
        shared = element("shared", sizes, "mul", normalised, second)
        gradient = element(
            "grad", sizes, "mul", element("rest", sizes, "sub", difference, shared), rstd
        )
        of_channels = rearranged(upstream, flat)
        weighted = element("weighted", flat, "mul", of_channels, rearranged(normalised, flat))
        return (
            rearranged(gradient, source.sizes),
            *(
                in_two_steps(total(label, of, (0, 2), (channels,), False), self.hint, label)
                for label, of in (("grad_weight", weighted), ("grad_bias", of_channels))
            ),
        )

    # --- rearrangements

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
        arguments = arguments_of(node)
        source: Node = self.known[node.args[0]]
        dim = arguments.get("dim", 0) % len(source.sizes)
        start, step = arguments.get("start"), arguments.get("step", 1)
        start = self.start(node, start, source.sizes[dim])
        return self.parts.cut(source, dim, start, self.sizes_of(node)[dim], step)

    def start(self, node: FxNode, start: Any, size: sympy.Expr) -> sympy.Expr:
        """Return where a slice begins, counted from the front."""
        if start is None:
            return sympy.Integer(0)
        expression = self.exact(expression_of(number_of(start)))
        hint = self.hint(expression)
        if hint < 0:
            return self.exact(size + expression)
        return size if hint > self.hint(size) else expression

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
        dim = arguments_of(node).get("dim", 0) % len(source.sizes)
        start: sympy.Expr = sympy.Integer(0)
        parts = []
        for part in node.meta["val"]:
            size = self.exact(expression_of(part.shape[dim]))
            parts.append(self.parts.cut(source, dim, start, size, 1))
            start = self.exact(start + size)
        return tuple(parts)

    op_split_with_sizes = op_split

    def op_cat(self, node: FxNode) -> Node:
        sources = [self.known[one] for one in node.args[0]]
        rank = len(node.meta["val"].shape)
        dim = (node.args[1] if len(node.args) > 1 else 0) % max(rank, 1)
        kind = kind_of(node.meta["val"].dtype)
        sources = [
            self.converted(node, one, kind) for one in sources if len(one.sizes) == rank
        ]  # PyTorch leaves out empty tensors of one dimension
        return self.parts.joined(self.common(node), dim, sources)

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
        return self.parts.joined(self.common(node), dim, sources)

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
        start = self.start(node, start, common["sizes"][dim])
        around = around or self.pointwise(node, "same", (Constant(0),))
        return self.parts.placed(common, dim, start, step, part, around)

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
        for place in range(len(amounts) // 2):
            dim = rank - 1 - place
            before, behind = (
                self.exact(expression_of(number_of(one)))
                for one in amounts[2 * place : 2 * place + 2]
            )
            for amount, is_front in ((before, True), (behind, False)):
                hint = self.hint(amount)
                size = result.sizes[dim]
                if hint < 0:
                    start = -amount if is_front else sympy.Integer(0)
                    result = self.parts.cut(result, dim, start, self.exact(size + amount), 1)
                elif hint > 0:
                    sizes = (*result.sizes[:dim], amount, *result.sizes[dim + 1 :])
                    filled = self.element(node, "filled", sizes, result.kind, "same", value)
                    whole = (
                        *result.sizes[:dim],
                        self.exact(size + amount),
                        *result.sizes[dim + 1 :],
                    )
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
            hint, size_hint = self.hint(amount), self.hint(size)
            if not 0 < abs(hint) < size_hint:
                result = self.rolled(node, result, dim, number_of(shift))
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


def quotient_of(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    return size / by if size.is_number else size // by
