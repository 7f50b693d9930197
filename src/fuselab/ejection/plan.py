"""Name all that the emitters and the launchers of a package write down of its kernels.

A ``KernelPlan`` has the kernel's operands in order, each with its dimensions in the names of the
axes, the sizes that are numbers of its arithmetic, and the results that it stores.
"""

from __future__ import annotations

import keyword
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from sympy.printing.str import StrPrinter

from fuselab.ejection.capture import Captured
from fuselab.ejection.exact_sizes import with_symbols
from fuselab.ejection.kernels import Kernel, product
from fuselab.ejection.loops import (
    Apply,
    Axis,
    ChosenAxis,
    Expression,
    Index,
    Load,
    Node,
    Position,
    Reduced,
    Scanned,
    Size,
    children,
    chosen_in,
    walk,
)
from fuselab.ejection.picks import Pick
from fuselab.errors import EjectError

_DIMS = {
    1: ("width",),
    2: ("length", "width"),
    3: ("batch", "length", "width"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "depth", "height", "width"),
}
# Names that emitted code uses for something else.
_TAKEN = {
    *("rows", "columns", "row", "column", "element", "exists", "is_row", "is_column", "block"),
    *("first", "end", "start", "sizes", "row_sizes", "column_sizes", "partials"),
    *("tl", "triton", "libdevice", "math", "philox", "numel", "offset", "load", "tile"),
    *("larger", "smaller", "product", "position_of", "range", "float"),
    *("sums", "shares", "turn", "first_turn", "end_turn", "turn_partials"),
    *("in_share", "in_shares", "in_first", "is_picked"),
    *("member", "firsts", "first_share", "first_shares", "row_counts", "column_counts"),
}


# The device functions of ``runtime/triton_loops.py`` that kernels call.
KERNEL_FUNCTIONS = (
    "add_rows",
    "block_of_columns",
    "block_of_rows",
    "columns_between",
    "is_in",
    "joined_exponentials",
    "joined_squares",
    "larger",
    "load",
    "load_inside",
    "load_left",
    "load_pairs",
    "load_partials",
    "load_rows",
    "mean_of_block",
    "numel",
    "of_lists",
    "of_member",
    "of_pairs",
    "of_rows",
    "offset",
    "partials_of_turn",
    "product",
    "rows_of_lists",
    "share_of_columns",
    "share_of_rows",
    "shifted_exponentials",
    "smaller",
    "squares_about_mean",
    "store_left",
    "store_pairs",
    "store_partial",
    "store_share",
    "sum_of_shares",
    "tile",
    "turn_of_rows",
    "with_exponentials",
)


@dataclass(frozen=True)
class Operand:
    """A tensor of a kernel: its name there, the node, and its dimensions in names of axes. For a
    ``position`` there is no tensor: the value is the position along the axes. ``steps`` are the
    names of the strides of the dimensions along which the kernel computes the position."""

    name: str
    node: Node | None
    index: Index
    pattern: str
    is_stored: bool = False
    steps: tuple[str, ...] = ()

    @property
    def chosen(self) -> tuple[tuple[Expression, str], ...]:
        """The positions that the kernel computes, each with the name of its stride."""
        values = (axis.value for axis in chosen_in(self.index))
        return tuple(zip(values, self.steps, strict=True))


@dataclass(frozen=True)
class Shifted:
    """The number that a sum of exponentials subtracts from its terms, and their largest term, from
    which that is computed."""

    largest: Reduced
    shift: Expression


@dataclass(frozen=True)
class KernelPlan:
    """One kernel of a package, with every name decided.

    ``numbers`` are the sizes that the kernel takes as arguments of their own; the number of its
    columns it has in any case. ``sums`` are the results that are sums over the rows; what is in
    ``stores`` for them are the terms. ``deviations`` are the sums of squared deviations that the
    sweep computes that sums up the terms themselves, each with the sum of these. ``exponentials``
    are the sums of exponentials that the sweep computes that finds the largest term. ``picks`` are
    the sums that no sweep computes, because a single column counts.
    """

    name: str
    kernel: Kernel
    axis_names: Mapping[Axis, str]
    operands: tuple[Operand, ...]
    numbers: Mapping[Size, str]
    value_names: Mapping[Expression, str]
    stores: Mapping[Node, Expression]
    sums: frozenset[Node] = frozenset()
    deviations: Mapping[Reduced, Reduced] = field(default_factory=dict)
    exponentials: Mapping[Reduced, Shifted] = field(default_factory=dict)
    picks: Mapping[Reduced, Pick] = field(default_factory=dict)
    code: str | None = None  # the name of the kernel whose code it shares, where it has none
    of_lists: bool = False  # whether tensors of lists share its code
    _depths: dict[Expression, int] = field(default_factory=dict)
    _axes: dict[Expression, frozenset[Axis]] = field(default_factory=dict)

    @property
    def launched(self) -> str:
        """The name of the kernel that is launched."""
        return self.code or self.name

    @property
    def loads(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if not operand.is_stored)

    @property
    def stored(self) -> tuple[Operand, ...]:
        return tuple(operand for operand in self.operands if operand.is_stored)

    @property
    def steps(self) -> tuple[str, ...]:
        """The names of the strides that kernels take as numbers, behind ``numbers``."""
        return tuple(step for operand in self.operands for step in operand.steps)

    @property
    def reductions(self) -> tuple[Reduced, ...]:
        found = walk(list(self.stores.values()))
        return tuple(one for one in found if isinstance(one, Reduced) and one not in self.picks)

    @property
    def scans(self) -> tuple[Scanned, ...]:
        found = walk(list(self.stores.values()))
        return tuple(one for one in found if isinstance(one, Scanned))

    @property
    def has_columns(self) -> bool:
        """Whether programs sweep over the columns of rows, to reduce or to scan them."""
        return bool(self.reductions or self.scans)

    def depth(self, expression: Expression) -> int:
        """Return how many reductions come one after the other before the value is known."""
        if expression not in self._depths:
            below = max(map(self.depth, children(expression)), default=0)
            # The sum of squared deviations is known as soon as the mean is, and likewise others.
            is_later = isinstance(expression, Reduced) and not any(
                expression in known for known in (self.deviations, self.exponentials, self.picks)
            )
            self._depths[expression] = below + is_later
        return self._depths[expression]

    def axes_of(self, expression: Expression) -> frozenset[Axis]:
        """Return the axes on which the value depends."""
        if expression not in self._axes:
            self._axes[expression] = self._axes_of(expression)
        return self._axes[expression]

    def _axes_of(self, expression: Expression) -> frozenset[Axis]:
        if isinstance(expression, Position):
            return frozenset(expression.axes)
        below: frozenset[Axis] = frozenset().union(*map(self.axes_of, children(expression)))
        if isinstance(expression, Reduced):
            return below - set(self.kernel.column_axes)
        if isinstance(expression, Scanned):
            return below.union(self.kernel.column_axes)
        if isinstance(expression, Load):
            return below.union(*expression.index) - set(chosen_in(expression.index))
        return below


# What emitted code puts behind the name of an operand or of a value.
SUFFIXES = (
    *("_row", "_line", "_offset", "_terms", "_pointer", "_so_far", "_about"),
    *("_strides", "_row_strides", "_column_strides"),
)


def with_code(plans: Sequence[KernelPlan]) -> list[KernelPlan]:
    """Return the kernels that share no other one's code."""
    return [plan for plan in plans if plan.code is None]


def kernel_name(name: str) -> str:
    """Return the name of an operator's first kernel: the operator's own, unless kernels use it for
    something else."""
    return f"{name}_kernel" if name in _TAKEN or name in KERNEL_FUNCTIONS else name


class Namer:
    """Gives every name once, with the names that emitted code derives from it; outside of kernels,
    names that kernels use for something else are free."""

    def __init__(self, taken: Sequence[str] = (), in_kernel: bool = True) -> None:
        self.taken = {one for name in taken for one in derived(name)}
        self.taken.update(_TAKEN if in_kernel else ())

    def name(self, wanted: str) -> str:
        wanted = re.sub(r"\W+", "_", wanted).strip("_") or "value"
        if keyword.iskeyword(wanted) or wanted[0].isdigit():
            wanted = f"value_{wanted}"
        name, count = wanted, 1
        while not self.taken.isdisjoint(derived(name)):
            count += 1
            name = f"{wanted}_{count}"
        self.taken.update(derived(name))
        return name


def derived(name: str) -> set[str]:
    """Return a name and those that emitted code derives from it."""
    return {name, *(f"{name}{suffix}" for suffix in SUFFIXES)}


class Sizes:
    """The names of sizes in launchers, each the size of a dimension of an argument."""

    def __init__(self, captured: Captured) -> None:
        namer = Namer([argument.name for argument in captured.arguments])
        ranks = {argument.name: argument.tensor.dim() for argument in captured.arguments}
        self.names: dict[sympy.Symbol, str] = {}
        self.places = captured.sizes
        self.equal = captured.equal
        self.hints = captured.hints
        for symbol, (argument, dim) in captured.sizes.items():
            rank = ranks[argument]
            wanted = _DIMS[rank][dim] if rank in _DIMS else f"dim_{dim}"
            if wanted in self.names.values():
                wanted = f"{argument}_{wanted}"
            self.names[symbol] = namer.name(wanted)

    def text(self, size: sympy.Expr) -> str:
        """Return a size as Python text."""
        return printed(self._named(size))

    def number_text(self, number: sympy.Expr) -> str:
        """Return a number of PyTorch's own formulas as Python text. PyTorch computes it in C++,
        where a division by zero is no error (``runtime.sweep.quotient``)."""
        return printed(self._named(number), _NumberPrinter())

    def _named(self, size: sympy.Expr) -> sympy.Expr:
        size = with_symbols(size, self.equal)
        return with_symbols(size, {one: sympy.Symbol(name) for one, name in self.names.items()})

    def condition_text(self, condition: sympy.Basic, name: str) -> str:
        """Return a condition as Python text. Raises EjectError where the function, ``name``,
        decides by a size that no argument of its kernels has."""
        known = with_symbols(condition, self.equal)
        if not set(self.names).issuperset(known.free_symbols):
            raise EjectError(
                f"{name} decides by the size of a tensor that it does not compute with; eject the "
                "parts before and after it."
            )
        return self.text(condition)

    def value_text(self, value: Any) -> str:
        """Return a number that a graph computes, or a shape, as Python text."""
        if isinstance(value, torch.Size):
            inner = ", ".join(map(self.value_text, value))
            return f"({inner}{',' if len(value) == 1 else ''})"
        if isinstance(value, (torch.SymInt, torch.SymFloat)):
            return self.text(value.node.expr)
        return repr(value)

    def multiples(
        self, sizes: Sequence[sympy.Expr], divisions: Set[tuple[sympy.Expr, sympy.Expr]]
    ) -> dict[str, int]:
        """Return what is divided in ``sizes``, or by ``divisions``, and the number that divides
        it: a size by its name, or a sum of products of sizes as text."""
        found: dict[str, int] = {}
        for one, by in _divided((*sizes, *(sympy.floor(one / by) for one, by in divisions))):
            text = self._sum_of_products(one) if by.is_Integer else None
            if text is not None:
                found[text] = math.lcm(found.get(text, 1), int(by))
        return dict(sorted(found.items()))  # divisions have no order that is the same every time

    def shares(self, sizes: Sequence[sympy.Expr]) -> list[str]:
        """Return the conditions under which sizes that are divided by others, as by those of
        another tensor in ``view``, are divided exactly."""
        pairs = dict.fromkeys(pair for pair in _divided(sizes) if not pair[1].is_Integer)
        texts = [(self.text(one), self.text(by)) for one, by in pairs]
        return [f"{by} != 0 and {_in_brackets(one)} % {_in_brackets(by)} == 0" for one, by in texts]

    def _sum_of_products(self, size: sympy.Expr) -> str | None:
        """Return a size as ``runtime.signature.sum_of_products`` reads it; None where it is no
        such sum."""
        products = []
        for term in sympy.Add.make_args(sympy.expand(with_symbols(size, self.equal))):
            number, factors = term.as_coeff_mul()
            powers = [factor.as_base_exp() for factor in factors]
            if not powers or not all(
                base in self.names and power.is_Integer and power > 0 for base, power in powers
            ):
                return None
            words = [self.names[base] for base, power in powers for _ in range(int(power))]
            products.append(" * ".join([str(number)] * (number != 1) + sorted(words)))
        return " + ".join(sorted(products))

    def statements(self, available: Sequence[str]) -> list[str]:
        """Return Python statements that define the sizes of the arguments that are available."""
        lines = []
        for symbol, (argument, dim) in self.places.items():
            if argument in available:
                lines.append(f"{self.names[symbol]} = {argument}.shape[{dim}]")
        return lines

    def axis_name(self, axis: Axis, namer: Namer) -> str:
        text = self.text(axis.size)
        if text.isidentifier():
            return namer.name(text)
        words = re.findall(r"[a-z_]+", text)
        return namer.name(f"{words[0]}_part" if words else "group")


def _divided(sizes: Sequence[sympy.Expr]) -> Iterator[tuple[sympy.Expr, sympy.Expr]]:
    """Yield what is divided in ``sizes``, and by what."""
    for size in sizes:
        for part in sympy.preorder_traversal(size):
            if type(part).__name__ in ("floor", "FloorDiv"):
                one, by = part.args if len(part.args) == 2 else part.args[0].as_numer_denom()
                yield one, by


def _in_brackets(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


_SIGNS = {
    "Equality": "==",
    "Unequality": "!=",
    "StrictLessThan": "<",
    "LessThan": "<=",
    "StrictGreaterThan": ">",
    "GreaterThan": ">=",
}


def printed(size: sympy.Basic, printer: StrPrinter | None = None) -> str:
    """Return a size, or a condition on sizes, as Python text."""
    text = re.sub(r" *(\*\*|//|[*/%]) *", r" \1 ", str((printer or _Printer()).doprint(size)))
    is_whole = text.startswith("(") and text.endswith(")") and text.count("(") == 1
    return text[1:-1] if is_whole else text


class _Printer(StrPrinter):  # type: ignore[misc]  # sympy has no types
    """Prints sizes, and numbers that are computed from them, as Python."""

    def _binary(self, expr: sympy.Expr, sign: str) -> str:
        one, other = expr.args
        return f"({self.parenthesize(one, 50)} {sign} {self.parenthesize(other, 51)})"

    def _called(self, expr: sympy.Expr, name: str) -> str:
        return f"{name}({', '.join(map(self._print, expr.args))})"

    def _print_FloorDiv(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._binary(expr, "//")

    def _print_Floored(self, expr: sympy.Expr) -> str:  # noqa: N802
        return str(self._print_FloorDiv(expr))

    def _print_FloatTrueDiv(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._binary(expr, "/")

    _print_IntTrueDiv = _print_FloatTrueDiv  # noqa: N815

    def _print_Mod(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._binary(expr, "%")

    _print_PythonMod = _print_Mod  # noqa: N815

    def _print_ModularIndexing(self, expr: sympy.Expr) -> str:  # noqa: N802
        one, divisor, modulus = (self.parenthesize(arg, 51) for arg in expr.args)
        return f"({one} // {divisor} % {modulus})"

    def _print_CeilDiv(self, expr: sympy.Expr) -> str:  # noqa: N802
        one, other = (self.parenthesize(arg, 51) for arg in expr.args)
        return f"(-(-{one} // {other}))"

    def _print_Pow(self, expr: sympy.Expr, rational: bool = False) -> str:  # noqa: N802
        base, exponent = expr.args
        power = exponent if exponent.is_Integer or not exponent.is_Rational else exponent.evalf(17)
        return f"({self.parenthesize(base, 61)} ** {self.parenthesize(power, 61)})"

    _print_FloatPow = _print_PowByNatural = _print_Pow  # noqa: N815

    def _print_Float(self, expr: sympy.Float) -> str:  # noqa: N802
        return repr(float(expr))

    def _print_Relational(self, expr: sympy.Rel) -> str:  # noqa: N802
        return f"{printed(expr.lhs)} {_SIGNS[type(expr).__name__]} {printed(expr.rhs)}"

    def _print_And(self, expr: sympy.And) -> str:  # noqa: N802
        return " and ".join(f"({self._print(arg)})" for arg in sorted(expr.args, key=str))

    def _print_Or(self, expr: sympy.Or) -> str:  # noqa: N802
        return " or ".join(f"({self._print(arg)})" for arg in sorted(expr.args, key=str))

    def _print_Not(self, expr: sympy.Not) -> str:  # noqa: N802
        return f"not ({self._print(expr.args[0])})"

    def _print_Min(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "min")

    def _print_Max(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "max")

    def _print_Abs(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "abs")

    def _print_ToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802
        return str(self.parenthesize(expr.args[0], 50))

    _print_Identity = _print_ToFloat  # noqa: N815

    def _print_TruncToInt(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "int")

    def _print_TruncToFloat(self, expr: sympy.Expr) -> str:  # noqa: N802
        return f"float({self._called(expr, 'int')})"

    def _print_RoundToInt(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "round")

    _print_RoundDecimal = _print_RoundToInt  # noqa: N815

    def _print_CeilToInt(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "math.ceil")

    def _print_FloorToInt(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "math.floor")

    def _print_floor(self, expr: sympy.Expr) -> str:
        one, other = expr.args[0].as_numer_denom()
        return f"({self.parenthesize(one, 50)} // {self.parenthesize(other, 51)})"

    def _print_Function(self, expr: sympy.Function) -> str:  # noqa: N802
        """Print a function of ``math``, which torch's sizes call by an opaque name."""
        name = expr.func.__name__.removeprefix("OpaqueUnaryFn_")
        if name == "sqrt":
            return f"({self.parenthesize(expr.args[0], 61)} ** 0.5)"
        if not hasattr(math, name):
            raise EjectError(f"sizes are computed by '{name}', which cannot be written.")
        return self._called(expr, f"math.{name}")


class _NumberPrinter(_Printer):
    """Prints numbers that are divided as PyTorch does it in C++."""

    def _print_FloatTrueDiv(self, expr: sympy.Expr) -> str:  # noqa: N802
        return self._called(expr, "quotient")

    _print_IntTrueDiv = _print_FloatTrueDiv  # noqa: N815


def planned(
    name: str,
    kernel: Kernel,
    stores: Sequence[Node],
    sizes: Sizes,
    tensor_names: Mapping[Node, str],
    sums: frozenset[Node] = frozenset(),
    taken: Sequence[str] = (),
) -> KernelPlan:
    """Return the kernel with its names, none of which is ``taken``."""
    values = {node: kernel.values[node] for node in stores}
    axes = (*kernel.row_axes, *kernel.column_axes)
    axis_namer = Namer()
    axis_names = {axis: sizes.axis_name(axis, axis_namer) for axis in axes}
    namer = Namer(taken)
    operands: list[Operand] = []
    value_names: dict[Expression, str] = {}
    numbers: dict[Size, str] = {}
    numbers_of_columns: set[Size] = set()

    def pattern(index: Index) -> str:
        dims = [" ".join(map(axis_name, entry)) or "1" for entry in index]
        return " ".join(f"({dim})" if " " in dim else dim for dim in dims)

    def axis_name(axis: Axis) -> str:
        return "?" if isinstance(axis, ChosenAxis) else axis_names[axis]

    def steps(operand: str, index: Index) -> tuple[str, ...]:
        dims = [dim for dim, entry in enumerate(index) if chosen_in((entry,))]
        return tuple(
            namer.name(f"{operand}_step" if len(dims) == 1 else f"{operand}_step_{dim}")
            for dim in dims
        )

    expressions = list(walk(list(values.values())))
    for one in expressions:
        if isinstance(one, Load):
            operand = namer.name(tensor_names.get(one.tensor, one.tensor.name))
            value_names[one] = operand
            operands.append(
                Operand(
                    operand,
                    one.tensor,
                    one.index,
                    pattern(one.index),
                    steps=steps(operand, one.index),
                )
            )
        elif isinstance(one, Position):
            operand = namer.name(f"{'_'.join(axis_names[axis] for axis in one.axes)}_position")
            value_names[one] = operand
            operands.append(Operand(operand, None, (one.axes,), pattern((one.axes,))))
        elif (
            isinstance(one, Size) and kernel.column_axes and one.size == product(kernel.column_axes)
        ):
            numbers_of_columns.add(one)
        elif isinstance(one, Size) and not one.size.is_number:
            words = re.sub(r"\W+", "_", sizes.text(one.size)).strip("_")
            numbers[one] = namer.name(f"{words}_count")
    for node in stores:
        index = next(member.index for member in kernel.members if member.node is node)
        index = index[: len(node.sizes)]
        operand = namer.name(tensor_names.get(node, node.name))
        operands.append(Operand(operand, node, index, pattern(index), True))
        value = values[node]
        # A value that the user's code names, or that is stored twice, has the name of its result.
        deserves = value in kernel.users_names or list(values.values()).count(value) > 1
        if isinstance(value, Apply) and value.kind == node.kind and deserves:
            value_names.setdefault(value, operand)
    for one, wanted in _wanted_names(kernel, expressions, list(values.values())).items():
        if one not in value_names:
            value_names[one] = namer.name(wanted)
    value_names.update(dict.fromkeys(numbers_of_columns, "columns"))
    return KernelPlan(name, kernel, axis_names, tuple(operands), numbers, value_names, values, sums)


def _wanted_names(
    kernel: Kernel, expressions: Sequence[Expression], results: Sequence[Expression]
) -> dict[Expression, str]:
    """Return names for the values that deserve one: reductions, values that are used more than
    once, and those that the user's code names."""
    uses = Counter(child for one in expressions for child in set(children(one)))
    uses.update(results)
    names = dict(kernel.names)
    found: dict[Expression, str] = {}
    for one in expressions:
        if isinstance(one, Reduced):
            found[one] = names.get(one, {"sum": "total"}.get(one.function, one.function))
        elif isinstance(one, Scanned):
            found[one] = names.get(one, f"running_{one.function}")
        elif isinstance(one, Apply) and (uses[one] > 1 or one in kernel.users_names):
            found[one] = names.get(one, one.function)
    return found
