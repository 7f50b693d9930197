"""The intermediate form: tensors as functions of an index, and scalar expressions over axes.

A ``Node`` is a tensor of the graph. It is not computed where it stands: a kernel asks for its value
at an index, and the answer is an ``Expression`` of loads and arithmetic. An index has one entry for
every dimension: the axes whose positions, outermost first, make up the position in the dimension;
no axis means position 0. Reshaping splits and joins such lists, and no offset is ever computed with
a division. Where an element is chosen by a number that the kernel computes, as a row of an
embedding is, a ``ChosenAxis`` stands in the index, which is that number and no loop.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import sympy

_serial = itertools.count()


@dataclass(frozen=True, eq=False)
class Axis:
    """A loop. ``size`` is symbolic; ``hint`` is its size in the example."""

    size: sympy.Expr
    hint: int
    serial: int = field(default_factory=lambda: next(_serial))

    def __repr__(self) -> str:
        return f"a{self.serial}:{self.size}"


@dataclass(frozen=True, eq=False, repr=False)
class ChosenAxis(Axis):
    """A position that a kernel computes, in the place of an axis: the integer ``value``, which is
    not negative and below ``size``. ``chosen_axis`` makes it."""

    value: Expression = None  # type: ignore[assignment]


Index = tuple[tuple[Axis, ...], ...]
Kind = Literal["float", "bool", "int"]


# --- expressions: what a kernel computes at one point of its loops --------------------------------

_known: weakref.WeakValueDictionary[Any, Any] = weakref.WeakValueDictionary()


class Interned:
    """The base of expressions: equal ones are one object, so that comparing and hashing an
    expression takes no time, however large it is."""

    def __new__(cls, *fields: Any) -> Any:
        # 1, 1.0 and True are equal and not the same constant.
        key = (cls, *fields, *map(type, fields))
        found = _known.get(key)
        if found is None:
            found = _known[key] = super().__new__(cls)
        return found


@dataclass(frozen=True, eq=False)
class Load(Interned):
    tensor: Node
    index: Index


@dataclass(frozen=True, eq=False)
class Constant(Interned):
    value: float | int | bool


@dataclass(frozen=True, eq=False)
class Size(Interned):
    """The value of a size, as a number of the arithmetic."""

    size: sympy.Expr


@dataclass(frozen=True, eq=False)
class Position(Interned):
    """The position along some axes, outermost first: an integer."""

    axes: tuple[Axis, ...]


@dataclass(frozen=True, eq=False)
class Apply(Interned):
    """A scalar function of expressions, by its name in ``functions.py``."""

    function: str
    operands: tuple[Expression, ...]
    kind: Kind


@dataclass(frozen=True, eq=False)
class Reduced(Interned):
    """A reduction of an expression over all columns of its kernel."""

    function: str
    operand: Expression
    kind: Kind


@dataclass(frozen=True, eq=False)
class Scanned(Interned):
    """A reduction of an expression over the columns of its kernel up to this one."""

    function: str
    operand: Expression
    kind: Kind


Expression = Load | Constant | Size | Position | Apply | Reduced | Scanned


_chosen: weakref.WeakValueDictionary[Any, ChosenAxis] = weakref.WeakValueDictionary()


def chosen_axis(size: sympy.Expr, hint: int, value: Expression) -> ChosenAxis:
    """Return the axis at whose only position ``value`` is; equal ones are one object."""
    found = _chosen.get((size, value))
    if found is None:
        found = _chosen[size, value] = ChosenAxis(size, hint, value=value)
    return found


def chosen_in(index: Index) -> list[ChosenAxis]:
    """Return the positions of an index that a kernel computes."""
    return [axis for entry in index for axis in entry if isinstance(axis, ChosenAxis)]


def position(axes: Sequence[Axis]) -> Expression:
    """Return the position along some axes, outermost first, as a number."""
    if not any(isinstance(axis, ChosenAxis) for axis in axes):
        return Position(tuple(axes))
    total: Expression | None = None
    for axis in axes:
        here = axis.value if isinstance(axis, ChosenAxis) else Position((axis,))
        if total is not None:
            size = Constant(int(axis.size)) if axis.size.is_number else Size(axis.size)
            here = Apply("add", (Apply("mul", (total, size), "int"), here), "int")
        total = here
    assert total is not None
    return total


def element_kind(expression: Expression) -> Kind:
    """Return the kind of an expression's values."""
    if isinstance(expression, Load):
        return expression.tensor.kind
    if isinstance(expression, Constant):
        is_int = isinstance(expression.value, int)
        return "bool" if isinstance(expression.value, bool) else "int" if is_int else "float"
    return "int" if isinstance(expression, (Size, Position)) else expression.kind


def children(expression: Expression) -> tuple[Expression, ...]:
    """Return what an expression is computed from; of a load, the positions that it computes."""
    if isinstance(expression, Apply):
        return expression.operands
    if isinstance(expression, Load):
        return tuple(axis.value for axis in chosen_in(expression.index))
    return (expression.operand,) if isinstance(expression, (Reduced, Scanned)) else ()


def walk(
    expressions: Sequence[Expression],
    known: Container[Expression] = (),
    leaves: Container[Expression] = (),
    parts: Callable[[Expression], Sequence[Expression]] = children,
) -> list[Expression]:
    """Return every expression once, operands first, without those that are ``known`` and what only
    these and the ``leaves`` need. ``parts`` returns what an expression is computed from."""
    order: dict[Expression, None] = {}

    def visit(expression: Expression) -> None:
        if expression not in known and expression not in order:
            for child in () if expression in leaves else parts(expression):
                visit(child)
            order[expression] = None

    for expression in expressions:
        visit(expression)
    return list(order)


# --- nodes: the tensors of the graph --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Node:
    """A tensor: its name in the user's words, its sizes, the kind of its elements, and the line of
    the user's code that it comes from. ``is_named`` says whether the user's code chose the name."""

    name: str
    sizes: tuple[sympy.Expr, ...]
    kind: Kind
    line: str = ""
    is_named: bool = False


@dataclass(frozen=True, eq=False)
class Input(Node):
    """An argument of the function, or the upstream gradient of an output."""


@dataclass(frozen=True, eq=False)
class Pointwise(Node):
    function: str = ""
    operands: tuple[Node | Constant | Size, ...] = ()


@dataclass(frozen=True, eq=False)
class View(Node):
    """The elements of ``source`` in another arrangement. ``index`` returns the source's index for
    one of the view's and for the source's sizes; it may split axes through the evaluation that it
    is given."""

    source: Node = None  # type: ignore[assignment]
    index: Rearrangement = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Window(Node):
    """A slice of a tensor in memory: every ``step``-th element along ``dim`` from ``start`` on."""

    source: Node = None  # type: ignore[assignment]
    dim: int = 0
    start: sympy.Expr = sympy.S.Zero
    step: int = 1


@dataclass(frozen=True, eq=False)
class Regrouped(Node):
    """An argument in another shape, which its launcher gives it."""

    source: Node = None  # type: ignore[assignment]


@dataclass(frozen=True, eq=False)
class Pieces(Node):
    """A tensor put together along ``dim``: each part fills a slice of it, every ``step``-th element
    from ``start`` on, and all of them fill it. Kernels compute the parts, never the whole."""

    dim: int = 0
    parts: tuple[Piece, ...] = ()


@dataclass(frozen=True, eq=False)
class Piece(Node):
    """One part of ``Pieces``: a value of its own in each, because it is stored in its place."""

    value: Node = None  # type: ignore[assignment]
    start: sympy.Expr = sympy.S.Zero
    step: int = 1


@dataclass(frozen=True, eq=False)
class Choice(Node):
    """The elements of ``source`` at computed positions. Along each of its dimensions, either
    ``places`` has a tensor of integers, which broadcasts to this node, or ``kept`` has the
    dimension of this node that it is. The integers are not negative and below the size."""

    source: Node = None  # type: ignore[assignment]
    places: tuple[Node | None, ...] = ()
    kept: tuple[int | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Along(Node):
    """The position along one dimension of the tensor itself (``torch.arange``)."""

    dim: int = 0


@dataclass(frozen=True, eq=False)
class Reduction(Node):
    """The reduction of ``source`` over ``dims``. Where it is the first of the places that fulfil a
    condition, ``places`` is how many there are, which stands for none."""

    function: str = ""
    source: Node = None  # type: ignore[assignment]
    dims: tuple[int, ...] = ()
    keepdim: bool = False
    places: sympy.Expr | None = None

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(dim for dim in range(len(self.source.sizes)) if dim not in self.dims)


@dataclass(frozen=True, eq=False)
class Scan(Node):
    """The reductions of ``source`` along ``dim`` up to each element."""

    function: str = ""
    source: Node = None  # type: ignore[assignment]
    dim: int = 0


@dataclass(frozen=True, eq=False)
class Call(Node):
    """A tensor that PyTorch computes between two kernels. ``operator`` is the text of the call, in
    which ``{0}`` stands for the first of ``operands``: a tensor, sizes, a kind in place of a dtype,
    or a plain value; a tuple may hold tensors and None."""

    operator: str = ""
    operands: tuple[object, ...] = ()


SAME = "{0}"  # the call that hands on a tensor as it is stored


class Splitter(Protocol):
    """Rearranges lists of axes; see ``kernels.Binding``."""

    def regroup(self, axes: Sequence[Axis], sizes: Sequence[sympy.Expr]) -> Index:
        """Return the axes in groups whose sizes multiply to ``sizes``."""


Rearrangement = Callable[[Index, Sequence[sympy.Expr], Splitter], Index]


def operands_of(node: Node) -> tuple[Node, ...]:
    """Return the nodes that a node is computed from."""
    if isinstance(node, (View, Reduction, Scan, Window, Regrouped)):
        return (node.source,)
    if isinstance(node, Choice):
        return (node.source, *(place for place in node.places if place is not None))
    if isinstance(node, Pieces):
        return node.parts
    if isinstance(node, Piece):
        return (node.value,)
    if isinstance(node, Pointwise):
        return tuple(operand for operand in node.operands if isinstance(operand, Node))
    if isinstance(node, Call):
        given = (one if isinstance(one, tuple) else (one,) for one in node.operands)
        return tuple(one for several in given for one in several if isinstance(one, Node))
    return ()
