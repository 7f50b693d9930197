"""Texts of Triton expressions: parentheses, constants, lists of parameters."""

from __future__ import annotations

import math
import re
import struct
import textwrap
from collections.abc import Sequence

from fuselab.ejection.functions import TRITON
from fuselab.ejection.loops import Apply, Constant

_INSIDE = re.compile(r"(?<=[(,]) ?\{(\d)\}(?=[,)])")

# How tightly the outermost operation of a function's text binds; calls and names most.
_BINDING = {
    **dict.fromkeys(("eq", "ne", "lt", "le", "gt", "ge", "isnan", "isinf", "not", "to_bool"), 1),
    **dict.fromkeys(("or",), 2),
    **dict.fromkeys(("xor",), 3),
    **dict.fromkeys(("and",), 4),
    **dict.fromkeys(("add", "sub"), 5),
    **dict.fromkeys(("mul", "div", "reciprocal"), 6),
    **dict.fromkeys(("neg", "invert"), 7),
}
_CALL = 9


def stands_in_a_call(template: str, place: int) -> bool:
    """Return whether an operand stands between the commas of a call."""
    return place in {int(found[1]) for found in _INSIDE.finditer(template)}


def needs_parentheses(outer: Apply, place: int, operand: Apply) -> bool:
    """Return whether the text of ``operand`` needs parentheses as an operand of ``outer``."""
    template = TRITON[outer.function]
    if stands_in_a_call(template, place):
        return False
    inner, around = (_BINDING.get(one.function, _CALL) for one in (operand, outer))
    if around == _CALL:
        return inner < _CALL  # a method's object
    return inner < around or (inner == around and (place > 0 or around <= 1))


def is_rounded_as_argument(outer: Apply, place: int) -> bool:
    """Return whether an operand is a constant that Triton would round to 32 bits: as the argument
    of a call, where it gets no dtype from the other operands. ``tl.where`` gives it that of the
    other value, if this is no constant too."""
    operand = outer.operands[place]
    if not isinstance(operand, Constant) or not isinstance(operand.value, float):
        return False
    is_typed = outer.function == "where" and not all(
        isinstance(one, Constant) for one in outer.operands[1:]
    )
    is_exact = not math.isfinite(operand.value) or _in_32_bits(operand.value) == operand.value
    return not is_exact and not is_typed and stands_in_a_call(TRITON[outer.function], place)


def _in_32_bits(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", value))[0])
    except OverflowError:
        return math.inf


def is_power_of_two(value: float | int | bool) -> bool:
    """Return whether dividing by the number and multiplying by its reciprocal are the same."""
    return abs(math.frexp(value)[0]) == 0.5 and 1e-30 < abs(value) < 1e30


def constant_text(value: float | int | bool) -> str:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return f"float('{value}')"
    return repr(value)


def listed(names: Sequence[str]) -> list[str]:
    """Return lines of parameters."""
    text = ", ".join(name.replace(" ", "\0") for name in names) + ","
    lines = textwrap.wrap(text, 96, initial_indent="    ", subsequent_indent="    ")
    return [line.replace("\0", " ") for line in lines]
