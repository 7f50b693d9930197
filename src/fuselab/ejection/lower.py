"""From ATen operators to the nodes of ``loops.py``.

What is neither pointwise nor a reduction nor a rearrangement becomes a ``Call``, which stays a
PyTorch call between the kernels.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import sympy
import torch
from torch import Tensor, fx

from fuselab.ejection.capture import Captured, is_user_named, source_line, user_name, with_sources
from fuselab.ejection.loops import (
    Along,
    Constant,
    Index,
    Input,
    Kind,
    Node,
    Pointwise,
    Reduction,
    Size,
    Splitter,
    View,
)
from fuselab.errors import EjectError

aten = torch.ops.aten
FxNode = Any  # torch.fx.Node, whose arguments are typed as a union of twenty types

# Operators that are one scalar function, by its name in `functions.py`.
_POINTWISE: dict[Any, str] = {
    aten.abs: "abs",
    aten.acos: "acos",
    aten.asin: "asin",
    aten.atan: "atan",
    aten.bitwise_and: "and",
    aten.bitwise_or: "or",
    aten.bitwise_xor: "xor",
    aten.ceil: "ceil",
    aten.cos: "cos",
    aten.div: "div",
    aten.true_divide: "div",
    aten.eq: "eq",
    aten.erf: "erf",
    aten.exp: "exp",
    aten.expm1: "expm1",
    aten.floor: "floor",
    aten.ge: "ge",
    aten.gt: "gt",
    aten.isnan: "isnan",
    aten.isinf: "isinf",
    aten.le: "le",
    aten.log: "log",
    aten.log1p: "log1p",
    aten.logical_and: "and",
    aten.logical_not: "not",
    aten.logical_or: "or",
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
    aten.sqrt: "sqrt",
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
_SAME = (aten.alias, aten.clone, aten.detach, aten.lift_fresh_copy, aten.contiguous)


@dataclass(frozen=True)
class Program:
    """The graph as nodes: arguments and upstream gradients, the outputs and the gradients."""

    inputs: tuple[Input, ...]
    upstream: tuple[Input, ...]
    outputs: tuple[Node, ...]
    gradients: tuple[Node | None, ...]


def lower(captured: Captured, upstream: Sequence[str] = ("grad_output",)) -> Program:
    """Return the captured graph as nodes; ``upstream`` names the upstream gradients."""
    lowering = _Lowering()
    for argument in captured.arguments:
        lowering.known[argument.node] = lowering.input(argument.node, argument.name)
    for node, name in zip(captured.upstream, upstream, strict=False):
        lowering.known[node] = lowering.input(node, name)
    wanted = with_sources(captured.outputs) | captured.behind_gradients()
    for node in captured.graph.nodes:
        if node in wanted and node.op == "call_function" and node not in lowering.known:
            lowering.known[node] = lowering.lower(node)
    known = lowering.known
    return Program(
        tuple(known[argument.node] for argument in captured.arguments),
        tuple(known[node] for node in captured.upstream),
        tuple(known[node] for node in captured.outputs),
        tuple(None if node is None else known[node] for node in captured.gradients),
    )


def expression_of(size: Any) -> sympy.Expr:
    """Return a size, an int or a SymInt, as a sympy expression."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(int(size))


def _kind(dtype: torch.dtype) -> Kind:
    if dtype == torch.bool:
        return "bool"
    return "float" if dtype.is_floating_point else "int"


class _Lowering:
    def __init__(self) -> None:
        self.known: dict[FxNode, Any] = {}

    def input(self, node: FxNode, name: str) -> Input:
        value: Tensor = node.meta["val"]
        return Input(name, tuple(map(expression_of, value.shape)), _kind(value.dtype))

    def lower(self, node: FxNode) -> Any:
        target: Any = node.target
        value = node.meta.get("val")
        if target is operator.getitem:
            return self.known[node.args[0]][node.args[1]]
        if isinstance(value, (torch.SymFloat, float)):
            return self.number(node)
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

    # --- helpers

    def common(self, node: FxNode, name: str | None = None) -> dict[str, Any]:
        value: Tensor = node.meta["val"]
        return {
            "name": name or user_name(node),
            "sizes": tuple(map(expression_of, value.shape)),
            "kind": _kind(value.dtype),
            "line": source_line(node),
            "is_named": is_user_named(node),
        }

    def value(self, argument: Any) -> Any:
        if isinstance(argument, fx.Node):
            if argument in self.known:
                return self.known[argument]
            return Size(expression_of(argument.meta["val"]))
        return Constant(argument)

    def values(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(map(self.value, arguments))

    def pointwise(self, node: FxNode, function: str, operands: tuple[Any, ...]) -> Node:
        return Pointwise(**self.common(node), function=function, operands=operands)

    def view(self, node: FxNode, source: Node, index: Callable[[Index, Splitter], Index]) -> Node:
        common = self.common(node)
        common["name"] = source.name
        return View(**common, source=source, index=index)

    def reduction(self, node: FxNode, function: str) -> Node:
        source: Node = self.known[node.args[0]]
        arguments = _bound(node)
        dims = arguments.get("dim")
        rank = len(source.sizes)
        dims = [dims] if isinstance(dims, int) else dims
        dims = sorted(dim % rank for dim in dims) if dims else list(range(rank))
        if not dims:
            return source  # the sum of a 0-d tensor
        return Reduction(
            **self.common(node),
            function=function,
            source=source,
            dims=tuple(dims),
            keepdim=bool(arguments.get("keepdim", False)),
        )

    def refuse(self, node: FxNode) -> NoReturn:
        raise EjectError(
            f"{node.target} has no generated kernel{_at(node)}; "
            "eject the parts before and after it."
        )

    def number(self, node: FxNode) -> Any:
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

    op_zeros, op_ones = op_zeros_like, op_ones_like

    def op_bitwise_not(self, node: FxNode) -> Node:
        is_bool = node.meta["val"].dtype == torch.bool
        return self.pointwise(node, "not" if is_bool else "invert", self.values(node.args))

    def op_arange(self, node: FxNode) -> Node:
        return Along(**self.common(node))

    def op_iota(self, node: FxNode) -> Node:
        return Along(**self.common(node))

    def op_convert_element_type(self, node: FxNode) -> Node:
        return self.cast(node, self.known[node.args[0]])

    def op__to_copy(self, node: FxNode) -> Node:
        return self.cast(node, self.known[node.args[0]])

    def cast(self, node: FxNode, source: Node) -> Node:
        kind = _kind(node.meta["val"].dtype)
        if kind == source.kind:
            return source
        return self.pointwise(node, f"to_{kind}", (source,))

    def op_mean(self, node: FxNode) -> Node:
        total = self.reduction(node, "sum")
        return self.pointwise(node, "div", (total, self.count(total)))

    def count(self, total: Node) -> Any:
        """Return the number of elements that a reduction sums up."""
        if not isinstance(total, Reduction):
            return Constant(1)
        sizes = (total.source.sizes[dim] for dim in total.dims)
        return Size(sympy.prod(list(sizes)))

    def op_var_mean(self, node: FxNode) -> tuple[Node, Node]:
        variance, mean = self.moments(node)
        return variance, mean

    def op_var(self, node: FxNode) -> Node:
        return self.moments(node)[0]

    def moments(self, node: FxNode) -> tuple[Node, Node]:
        """Return variance and mean: the mean of the squared deviations from the mean."""
        source = self.known[node.args[0]]
        arguments = _bound(node)
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
            return View(of.name, dropped, "float", of.line, False, of, _insert(dims))

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

        sums = total(source, "total")
        count = self.count(sums)
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
        groups = expression_of(_number(node.args[6]))
        batch, channels, area = (expression_of(_number(arg)) for arg in node.args[3:6])
        name, line = user_name(node), source_line(node)
        sizes = batch, groups, quotient_of(channels, groups) * area

        def element(label: str, of: Any, function: str, *operands: Any) -> Node:
            return Pointwise(f"{name}{label}", of, "float", line, False, function, operands)

        def regrouped(of: Node, into: tuple[sympy.Expr, ...]) -> Node:
            return View(of.name, into, "float", line, False, of, _regroup(of.sizes))

        grouped = regrouped(source, sizes)
        variance, mean = self.moments_of(node, grouped, (2,), 0)
        rstd = element(
            "_rstd", mean.sizes, "rsqrt", element("_shifted", mean.sizes, "add", variance, eps)
        )
        centred = element("_centred", sizes, "sub", grouped, mean)
        result = regrouped(element("_scaled", sizes, "mul", centred, rstd), source.sizes)
        spread = (sympy.Integer(1), channels, *[sympy.Integer(1)] * (len(source.sizes) - 2))
        for function, factor in (("mul", weight), ("add", bias)):
            if factor is not None:
                along = View(
                    factor.name, spread, "float", line, False, factor, lambda index, _: (index[1],)
                )
                result = element("", source.sizes, function, result, along)

        def squeezed(of: Node) -> Node:
            return View(of.name, sizes[:2], "float", line, False, of, _insert((2,)))

        return result, squeezed(mean), squeezed(rstd)

    # --- rearrangements

    def op_expand(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        return self.view(node, source, lambda index, _: unexpanded(index, source.sizes))

    def op_unsqueeze(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        dim = node.args[1] % (len(source.sizes) + 1)
        return self.view(node, source, lambda index, _: (*index[:dim], *index[dim + 1 :]))

    def op_squeeze(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        rank = len(source.sizes)
        dims = node.args[1] if len(node.args) > 1 else range(rank)
        dims = [dims] if isinstance(dims, int) else dims
        gone = sorted(dim % rank for dim in dims if source.sizes[dim % rank] == 1)
        return self.view(node, source, _insert(gone))

    def op_permute(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        order = [dim % len(source.sizes) for dim in node.args[1]]
        places = [order.index(dim) for dim in range(len(order))]
        return self.view(node, source, lambda index, _: tuple(index[place] for place in places))

    def op_transpose(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        first, second = (dim % len(source.sizes) for dim in node.args[1:3])

        def index_of(index: Index, _: Splitter) -> Index:
            swapped = list(index)
            swapped[first], swapped[second] = index[second], index[first]
            return tuple(swapped)

        return self.view(node, source, index_of)

    def op_slice(self, node: FxNode) -> Node:
        if tuple(node.meta["val"].shape) != tuple(node.args[0].meta["val"].shape):
            self.refuse(node)
        source: Node = self.known[node.args[0]]
        return source

    op_slice_backward = op_slice

    def op_view(self, node: FxNode) -> Node:
        source = self.known[node.args[0]]
        return self.view(node, source, _regroup(source.sizes))

    op__unsafe_view = op_reshape = op_view


def _short(packet: Any) -> str:
    return str(getattr(packet, "__name__", packet))


def _at(node: FxNode) -> str:
    line = source_line(node)
    return f" ({line})" if line else ""


def _bound(node: FxNode) -> dict[str, Any]:
    """Return a node's arguments by their names in the operator's schema."""
    schema = node.target._schema
    names = [argument.name for argument in schema.arguments]
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _insert(dims: Sequence[int]) -> Callable[[Index, Splitter], Index]:
    """Return the index map that puts dimensions of size 1 back at ``dims``."""

    def index_of(index: Index, _: Splitter) -> Index:
        entries = list(index)
        for dim in sorted(dims):
            entries.insert(dim, ())
        return tuple(entries)

    return index_of


def _regroup(sizes: Sequence[sympy.Expr]) -> Callable[[Index, Splitter], Index]:
    """Return the index map of a tensor of ``sizes`` that is read in another shape."""
    return lambda index, splitter: splitter.regroup(
        [axis for axes in index for axis in axes], sizes
    )


def quotient_of(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    return size / by if size.is_number else size // by


def _number(argument: Any) -> Any:
    return argument.meta["val"] if isinstance(argument, fx.Node) else argument


def unexpanded(index: Index, sizes: Sequence[sympy.Expr]) -> Index:
    """Return the index into a tensor of ``sizes`` that broadcasting gives it, aligned at the end:
    position 0 where it has size 1."""
    tail = index[len(index) - len(sizes) :]
    return tuple(() if size == 1 else axes for axes, size in zip(tail, sizes, strict=True))
