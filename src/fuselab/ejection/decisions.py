"""Find what the user's code has decided by sizes while it was traced: which way of an ``if`` it
took, and which numbers it computed by functions that no symbol follows (``math.log`` of a size).

A graph has only the way that the example's sizes took. Where other sizes would take another one,
the kernels must not run. Code that reads the dtype of a tensor may decide by that too.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partialmethod
from types import FrameType
from typing import Any

import sympy
import torch
from torch._dynamo.variables.tensor import TensorVariable
from torch.fx.experimental.sym_node import SymNode

# Where PyTorch's tracer asks on behalf of the user's code. Other questions are those of PyTorch's
# operators, whether shapes fit; the kernels' own patterns ask them.
_TRACER = "_dynamo/"
_COMPARISONS = {
    "eq": sympy.Eq,
    "ge": sympy.Ge,
    "gt": sympy.Gt,
    "le": sympy.Le,
    "lt": sympy.Lt,
    "ne": sympy.Ne,
}
_EXTREMES = {"sym_max": sympy.Ge, "sym_min": sympy.Le}
# The methods by which Dynamo answers code that asks for the dtype of a tensor.
_DTYPE_READS = ("method_attr_dtype", "method_element_size", "method_type")
# What stands between a comparison in the user's code, as Dynamo runs it, and the sizes' own code.
_ON_THE_WAY = ("_dynamo/", "fx/experimental/", "torch/__init__.py")
_SIZES = (0, 1, 2, 3, 4, 5, 7, 8, 16, 31, 64, 100, 1000, 4099, 1 << 20)
_DRAWS = 300


_answered: list[sympy.Basic] = []  # what user's code has asked while `listening`
_dtype_reads: list[str] = []  # the methods by which it has read dtypes


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Keep the comparisons of sizes in the user's code that a tracer answers without a guard, by
    taking every size to be 2 or more: whether a batch has more than one row, or any. Keep whether
    the code reads the dtype of a tensor."""
    _answered.clear()
    _dtype_reads.clear()
    heard = {}
    for name, relation in (_COMPARISONS | _EXTREMES).items():
        keeping = _compared if name in _COMPARISONS else _chosen
        heard[name] = partialmethod(keeping, getattr(SymNode, name), relation)
    reads = {
        name: partialmethod(_read_dtype, getattr(TensorVariable, name), name)
        for name in _DTYPE_READS
        if name in vars(TensorVariable)
    }
    with _with_methods(SymNode, heard), _with_methods(TensorVariable, reads):
        yield


@contextlib.contextmanager
def not_listening() -> Iterator[None]:
    """Keep no comparisons within ``listening``, where PyTorch makes many for itself."""
    now = {name: vars(SymNode)[name] for name in (*_COMPARISONS, *_EXTREMES)}
    own = {
        name: one.args[0] if isinstance(one, partialmethod) else one for name, one in now.items()
    }
    with _with_methods(SymNode, own):
        yield


@contextlib.contextmanager
def _with_methods(owner: type, methods: Mapping[str, Any]) -> Iterator[None]:
    before = {name: vars(owner)[name] for name in methods}
    for name, method in methods.items():
        setattr(owner, name, method)
    try:
        yield
    finally:
        for name, method in before.items():
            setattr(owner, name, method)


def _read_dtype(self: Any, own: Callable[..., Any], name: str, *args: Any, **keywords: Any) -> Any:
    _dtype_reads.append(name)
    return own(self, *args, **keywords)


def reads_dtypes() -> bool:
    """Return whether the code that is being compiled has read the dtype of a tensor."""
    return bool(_dtype_reads)


def _compared(
    self: SymNode, own: Callable[..., SymNode], relation: Callable[..., Any], other: SymNode
) -> SymNode:
    found = own(self, other)
    if found.hint is not None and _is_asked_by_the_user(sys._getframe(1)):
        condition = relation(self.expr, other.expr, evaluate=False)
        _answered.append(condition if found.hint else condition.negated)
    return found


def _chosen(
    self: SymNode, own: Callable[..., SymNode], relation: Callable[..., Any], other: SymNode
) -> SymNode:
    """Keep that one of two sizes is known to be the larger, or the smaller."""
    found = own(self, other)
    for one, two in ((self.expr, other.expr), (other.expr, self.expr)):
        if found.expr == one and found.expr != two and _is_asked_by_the_user(sys._getframe(1)):
            _answered.append(relation(one, two, evaluate=False))
    return found


def _is_asked_by_the_user(frame: FrameType | None) -> bool:
    """Return whether a comparison is one of Python's, of two sizes, in the user's code: PyTorch's
    C++ compares sizes too, as to find out how a tensor lies in memory."""
    while frame is not None and frame.f_code.co_filename.endswith("functools.py"):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.endswith("fx/experimental/sym_node.py"):
        return False
    while frame is not None:
        file = frame.f_code.co_filename
        if file.endswith("_dynamo/symbolic_convert.py"):
            return True
        if not any(one in file for one in _ON_THE_WAY):
            return False
        frame = frame.f_back
    return False


def decisions() -> tuple[sympy.Basic, ...]:
    """Return the conditions on sizes under which the graph that is being compiled is the one that
    the user's code gives, in the order in which they were met. Some sizes do not meet them."""
    context = torch._guards.TracingContext.try_get()
    mode = None if context is None else context.fake_mode
    shape_env: Any = None if mode is None else mode.shape_env
    if shape_env is None:
        return ()
    found = [shape_env.replace(guard.expr) for guard in shape_env.guards if _is_the_users(guard)]
    found += [one for one in map(shape_env.replace, _answered) if _holds_from_two(one)]
    return tuple(one for one in dict.fromkeys(found) if not _holds_always(one))


def _is_the_users(guard: Any) -> bool:
    return _TRACER in str(getattr(getattr(guard, "sloc", None), "framework_loc", ""))


def _holds_always(condition: sympy.Basic) -> bool:
    """Return whether a condition holds for all sizes, as far as some hundred draws show."""
    return _holds(condition, _SIZES)


def _holds_from_two(condition: sympy.Basic) -> bool:
    """Return whether a condition holds for all sizes of 2 or more, as a tracer takes them to be."""
    return _holds(condition, [size for size in _SIZES if size >= 2])


def _holds(condition: sympy.Basic, sizes: Sequence[int]) -> bool:
    symbols = sorted(condition.free_symbols, key=str)
    return all(_value(condition, one) is not sympy.false for one in _drawn(symbols, sizes))


def _value(condition: sympy.Basic, sizes: dict[sympy.Symbol, int]) -> Any:
    """Return whether a condition holds; None for sizes at which it has no value (``1 / 0``)."""
    try:
        return condition.subs(sizes)
    except ZeroDivisionError:
        return None


def _drawn(
    symbols: Sequence[sympy.Symbol], sizes: Sequence[int]
) -> Iterator[dict[sympy.Symbol, int]]:
    if len(symbols) == 1:
        for size in sizes:
            yield {symbols[0]: size}
        return
    source = random.Random(0)
    for _ in itertools.repeat(None, _DRAWS):
        yield {symbol: source.choice(sizes) for symbol in symbols}
