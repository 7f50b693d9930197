"""Lower means and variances, and the normalisations that kernels are not given in simpler
operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from fuselab.ejection.arranged import Arrangements
from fuselab.ejection.calls import source_line
from fuselab.ejection.capture import user_name
from fuselab.ejection.graph_nodes import FxNode, arguments_of, expression_of
from fuselab.ejection.loops import Constant, Node, Pointwise, Reduction, Size, View
from fuselab.ejection.parts import regrouped
from fuselab.ejection.steps import Sizes, inserted, number_of
from fuselab.ejection.two_steps import LEAST_AREA, in_two_steps


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
        in_parts = self.in_parts(node, source, dims)
        variance, mean = self.moments_of(node, in_parts, dims, correction)
        if keepdim:
            return variance, mean
        dropped = tuple(size for dim, size in enumerate(source.sizes) if dim not in dims)

        def squeezed(of: Node) -> Node:
            return self.parts.view(
                View(of.name, dropped, "float", of.line, False, of, inserted(dims))
            )

        return squeezed(variance), squeezed(mean)

    def moments_of(
        self, node: FxNode, source: Node, dims: tuple[int, ...], correction: float
    ) -> tuple[Node, Node]:
        """Return variance and mean over ``dims``, which keep size 1."""
        name, line = user_name(node), source_line(node)
        kept = tuple(
            sympy.Integer(1) if dim in dims else size for dim, size in enumerate(source.sizes)
        )

        def total(of: Node, label: str) -> Node:
            label = f"{name}_{label}"
            return self.parts.reduction(
                Reduction(label, kept, "float", line, False, "sum", of, dims, True)
            )

        def element(label: str, sizes: Any, function: str, *operands: Any) -> Node:
            return self.element(node, f"{name}_{label}", sizes, "float", function, *operands)

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
        self.parts.require(area - 1)
        one = sympy.Integer(1)
        of_group = quotient_of(channels, groups)
        sizes = batch, groups, of_group * area
        flat = batch, channels, area

        def element(label: str, of: Sizes, function: str, *operands: Any) -> Node:
            return self.element(node, f"{name}_{label}", of, "float", function, *operands)

        def rearranged(of: Node, into: Sizes) -> Node:
            return self.parts.view(View(of.name, tuple(into), of.kind, line, False, of, regrouped))

        def total(label: str, of: Node, dims: int | tuple[int, ...], into: Sizes) -> Reduction:
            dims = (dims,) if isinstance(dims, int) else dims
            keepdim = len(into) == len(of.sizes)
            return Reduction(label, tuple(into), "float", line, False, "sum", of, dims, keepdim)

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
        kept = (*sizes[:2], one)
        of_channels = rearranged(upstream, flat)
        weighted = element("weighted", flat, "mul", of_channels, rearranged(normalised, flat))
        scaled = rearranged(scaled, sizes)
        if weight is None or self.hint(area) < LEAST_AREA:
            product = element("product", sizes, "mul", scaled, normalised)
            sums = [total("group_sum", scaled, 2, kept), total("group_product", product, 2, kept)]
            of_parameters = [
                in_two_steps(total(label, of, (0, 2), (channels,)), self.hint, label)
                for label, of in (("grad_weight", weighted), ("grad_bias", of_channels))
            ]
        else:
            # The sums over a group are those over its channels, each times its weight, so that
            # nothing is read once for the input's gradient and again for the parameters'.
            parts = [
                total("grad_bias_part", of_channels, 2, flat[:2]),
                total("grad_weight_part", weighted, 2, flat[:2]),
            ]
            shares = [
                element(f"{part.name}_scaled", flat[:2], "mul", part, weight) for part in parts
            ]
            sums = [
                total(label, rearranged(share, (*sizes[:2], of_group)), 2, kept)
                for label, share in zip(("group_sum", "group_product"), shares, strict=True)
            ]
            of_parameters = [
                total(label, part, 0, (channels,))
                for label, part in zip(("grad_weight", "grad_bias"), reversed(parts), strict=True)
            ]
        first, second = (
            element(f"mean_of_{label}", kept, "div", of, Size(sizes[2]))
            for label, of in zip(("scaled", "product"), sums, strict=True)
        )
        difference = element("difference", sizes, "sub", scaled, first)
        shared = element("shared", sizes, "mul", normalised, second)
        gradient = element(
            "grad", sizes, "mul", element("rest", sizes, "sub", difference, shared), rstd
        )
        return rearranged(gradient, source.sizes), *of_parameters


def quotient_of(size: sympy.Expr, by: sympy.Expr) -> sympy.Expr:
    return size / by if size.is_number else size // by
