"""Lower means and variances, and the normalisations that kernels are not given in simpler
operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from fuselab.ejection.arranged import Arrangements
from fuselab.ejection.capture import source_line, user_name
from fuselab.ejection.loops import Constant, Node, Pointwise, Reduction, Size, View
from fuselab.ejection.parts import regrouped
from fuselab.ejection.steps import FxNode, Sizes, arguments_of, expression_of, inserted, number_of
from fuselab.ejection.two_steps import in_two_steps


class Moments(Arrangements):
    """Means, variances, and group normalisation with its gradient."""

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


def quotient_of(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    return size / by if size.is_number else size // by
