"""Keep integers of fewer than 64 bits in the range of their dtype, as PyTorch does.

C++ and CUDA C++ kernels compute with integers of 64 bits, Triton ones with those of the operands.
Where a result may leave the range of the dtype that it has in PyTorch, it is converted to this
dtype: ``(a + b).float()`` of two ``uint8`` images wraps around at 256.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

aten = torch.ops.aten

# The scalar functions that convert to these dtypes.
NARROWING = {
    torch.int8: "int8",
    torch.int16: "int16",
    torch.int32: "int32",
    torch.uint8: "uint8",
}
Interval = tuple[int, int]  # the least and the largest value
_CASTS = (aten._to_copy, torch.ops.prims.convert_element_type)
_ARITHMETIC = (
    aten.__lshift__, aten.abs, aten.add, aten.bitwise_left_shift, aten.bitwise_not, aten.mul,
    aten.neg, aten.pow, aten.sub,
)  # fmt: skip
_ANDS = (aten.__and__, aten.bitwise_and)
_RIGHT_SHIFTS = (aten.__rshift__, aten.bitwise_right_shift)
_ANYTHING = (-(2**64), 2**64)
_SIGN_CHANGING = (aten.bitwise_not, aten.neg)


def integer_dtype(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor of integers, or of a node that is one; else None."""
    held = value.meta.get("val") if isinstance(value, fx.Node) else value
    if not isinstance(held, Tensor) or held.dtype == torch.bool or held.dtype.is_complex:
        return None
    return None if held.dtype.is_floating_point else held.dtype


def is_cast(node: fx.Node) -> bool:
    return _packet(node) in _CASTS


def is_arithmetic(node: fx.Node) -> bool:
    """Return whether a result can lie outside of the range that the operands have."""
    return _packet(node) in _ARITHMETIC


def _packet(node: fx.Node) -> Any:
    return getattr(node.target, "overloadpacket", None)


class Integers:
    """Hold what is known of the integers of a graph.

    ``arguments`` has the dtypes of the arguments with which integers are computed: for another
    dtype PyTorch would wrap around elsewhere.
    """

    def __init__(self) -> None:
        self.arguments: dict[str, torch.dtype] = {}
        self._intervals: dict[fx.Node, Interval] = {}
        self._of_arguments: dict[fx.Node, dict[str, torch.dtype]] = {}

    def argument(self, node: fx.Node, name: str) -> None:
        dtype = integer_dtype(node)
        if dtype is not None:
            self._of_arguments[node] = {name: dtype}

    def widened(self, node: fx.Node) -> list[fx.Node]:
        """Return the operands that have to have 64 bits, because neither they nor a number beside
        them have the range of the result."""
        dtype = integer_dtype(node)
        if dtype is None or not is_arithmetic(node):
            return []
        own = [one for one in node.all_input_nodes if integer_dtype(one)]
        numbers = [one for one in node.args if isinstance(one, int)]
        least, most = _range(dtype)
        if least == 0 and _packet(node) in _SIGN_CHANGING:
            return own
        is_inside = all(least <= number <= most for number in numbers)
        if is_inside and any(integer_dtype(one) == dtype for one in own):
            return []
        return own

    def conversion(self, node: fx.Node) -> str | None:
        """Return the function that a result has to go through, or None."""
        dtype = integer_dtype(node)
        if dtype is None:
            return None
        behind: dict[str, torch.dtype] = {}
        for one in node.all_input_nodes:
            behind |= self._of_arguments.get(one, {})
        self._of_arguments[node] = behind
        source = integer_dtype(node.args[0]) if node.args else None
        if not is_arithmetic(node) and not (is_cast(node) and source):
            return None
        self.arguments |= behind
        least, most = _range(dtype)
        interval = self._interval(node)
        is_inside = least <= interval[0] and interval[1] <= most
        self._intervals[node] = interval if is_inside else (least, most)
        if is_cast(node) and source is not None:
            if source == dtype:
                return None
            return "to_int" if _holds(dtype, source) else NARROWING[dtype]
        return None if is_inside or dtype == torch.int64 else NARROWING[dtype]

    def _interval(self, node: fx.Node) -> Interval:
        """Return the interval of a result before it is converted."""
        known = [self._of(one) for one in node.args[:2] if isinstance(one, (int, fx.Node))]
        packet = _packet(node)
        if is_cast(node):
            return known[0]
        if packet == aten.neg:
            return -known[0][1], -known[0][0]
        if len(known) < 2 or node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2:
            return _ANYTHING
        (a, b), (c, d) = known
        if packet == aten.add:
            return a + c, b + d
        if packet == aten.sub:
            return a - d, b - c
        products = (a * c, a * d, b * c, b * d)
        return (min(products), max(products)) if packet == aten.mul else _ANYTHING

    def _of(self, value: Any) -> Interval:
        if isinstance(value, int):
            return value, value
        if value in self._intervals:
            return self._intervals[value]
        source, number = (*value.args[:2], None, None)[:2]
        if isinstance(source, fx.Node) and isinstance(number, int) and number >= 0:
            least, most = self._of(source)
            if _packet(value) in _ANDS:
                return 0, number
            if _packet(value) in _RIGHT_SHIFTS:
                return least >> number, most >> number
        dtype = integer_dtype(value)
        return (0, 1) if dtype is None else _range(dtype)


def _range(dtype: torch.dtype) -> Interval:
    known = torch.iinfo(dtype)
    return known.min, known.max


def _holds(dtype: torch.dtype, other: torch.dtype) -> bool:
    """Return whether a dtype has all values of another."""
    (least, most), (lowest, highest) = _range(dtype), _range(other)
    return least <= lowest and highest <= most
