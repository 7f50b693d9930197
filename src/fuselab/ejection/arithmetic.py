"""Lower arithmetic that is more than one scalar function: operands that are scaled, quotients and
remainders, conditions, casts, and tensors of one number."""

from __future__ import annotations

import math
from typing import Any

import torch

from fuselab.ejection.graph_nodes import FxNode, arguments_of
from fuselab.ejection.loops import Along, Constant, Node, Pointwise
from fuselab.ejection.moments import Moments
from fuselab.ejection.steps import kind_of, number_of

aten = torch.ops.aten

# Powers that PyTorch computes by a simpler function.
_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal", 1.0: "same"}
INFINITY = Constant(float("inf"))


class Arithmetic(Moments):
    """Pointwise operators of several steps."""

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

    def op_relu(self, node: FxNode) -> Node:
        value: Node = self.known[node.args[0]]
        if value.kind != "float":
            return self.pointwise(node, "maximum", (value, Constant(0)))
        return self.pointwise(node, "relu", (value,))

    def op_round(self, node: FxNode) -> Node:
        """Return whole numbers, or numbers of some decimals, rounded half to even."""
        value, decimals = self.known[node.args[0]], node.kwargs.get("decimals", 0)
        if decimals == 0:
            return self.pointwise(node, "round", (value,))
        power = Constant(float(10 ** abs(decimals)))
        there, back = ("mul", "div") if decimals > 0 else ("div", "mul")
        scaled = self.step(node, "scaled", there, value, power)
        return self.pointwise(node, back, (self.step(node, "rounded", "round", scaled), power))

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

    def op_signbit(self, node: FxNode) -> Node:
        return self.pointwise(node, "same", (self.is_negative(node, self.known[node.args[0]]),))

    def op_copysign(self, node: FxNode) -> Node:
        value, sign = self.values(node.args)
        size = self.step(node, "size", "abs", value)
        negative = self.step(node, "negative", "neg", size)
        if not isinstance(sign, Node):
            return negative if math.copysign(1.0, sign.value) < 0 else size
        return self.pointwise(node, "where", (self.is_negative(node, sign), negative, size))

    def is_negative(self, node: FxNode, value: Node) -> Node:
        """Return whether a number is negative, as -0.0 is and NaN is not."""
        if value.kind != "float":
            return self.step(node, "is_negative", "lt", value, Constant(0), kind="bool")
        inverse = self.step(node, "inverse", "reciprocal", value, kind="float")
        negative, below_zero, is_zero = (
            self.step(node, label, function, one, Constant(0.0), kind="bool")
            for label, function, one in (
                ("is_negative", "lt", value),
                ("is_below", "lt", inverse),
                ("is_zero", "eq", value),
            )
        )
        negative_zero = self.step(node, "is_negative_zero", "and", below_zero, is_zero)
        return self.step(node, "is_negative", "or", negative, negative_zero, kind="bool")

    def op_polygamma(self, node: FxNode) -> Node:
        order, value = number_of(node.args[0]), self.known[node.args[1]]
        function = {0: "digamma", 1: "trigamma"}.get(order)
        if function is None:
            self.refuse(node)
        return self.pointwise(node, function, (value,))

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

    def op_copy(self, node: FxNode) -> Node:
        """Return the values that a tensor is overwritten with."""
        return self.pointwise(node, "same", (self.as_kind(node, self.known[node.args[1]]),))

    def op___lshift__(self, node: FxNode) -> Node:
        return self.pointwise(node, "shl", self.values(node.args))

    def op___rshift__(self, node: FxNode) -> Node:
        return self.pointwise(node, "shr", self.values(node.args))

    def op_fma(self, node: FxNode) -> Node:
        """Return a product and a sum, as Dynamo writes ``addcmul``."""
        one, other, more = self.values(node.args)
        product = self.step(node, "product", "mul", one, other)
        return self.pointwise(node, "add", (product, more))

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
