"""C++ source as text: numbers, formulas with parentheses, and lines of at most 100 columns."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from fuselab.ejection.loops import Constant, Expression, Kind

KEYWORDS = frozenset(
    """alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t
    char32_t class co_await co_return co_yield compl concept const const_cast consteval constexpr
    constinit continue decltype default delete do double dynamic_cast else enum explicit export
    extern false float for friend goto if inline int long mutable namespace new noexcept not not_eq
    nullptr operator or or_eq private protected public register reinterpret_cast requires return
    short signed sizeof static static_assert static_cast struct switch template this thread_local
    throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t while
    xor xor_eq""".split()  # noqa: SIM905 -- a list of 92 literals does not read better
)
# Names of the frame of a kernel, and of what it uses of cpu_sweep.h.
FRAME = {
    "at",
    "loops",
    "lane",
    "math",
    "position",
    "arrays",
    "sweep",
    "std",
    "constant",
    "kernels",
}
TYPES = {
    "V",
    "Real",
    "Lane",
    "Loops",
    "Sum",
    "Count",
    "Product",
    "Maximum",
    "Minimum",
    "Half",
    "BFloat16",
}
_ATOM = re.compile(r"[\w.:]+(<\w+>)?(\(.*\))?$", re.DOTALL)
_INSIDE = re.compile(r"(?<=[(,]) ?\{(\d)\}(?=[,)])")


def constant_text(value: float | int | bool, kind: Kind) -> str:
    """Return a number as a scalar of the arithmetic."""
    if kind == "bool":
        return "true" if value else "false"
    if kind == "int":
        return f"int64_t({int(value)})"
    value = float(value)
    if value != value:
        return "Real(NAN)"
    if value in (float("inf"), float("-inf")):
        return "Real(INFINITY)" if value > 0 else "Real(-INFINITY)"
    return f"Real({int(value)})" if value == int(value) and abs(value) < 1e6 else f"Real({value!r})"


def word_texts(words: Sequence[Expression]) -> list[str]:
    """Return constants as numbers of 32 bits."""
    return [f"{one.value}u" for one in words if isinstance(one, Constant)]


def applied(template: str, texts: Sequence[str]) -> str:
    """Return the template with operands, in parentheses where they need them."""
    inside = {int(found[1]) for found in _INSIDE.finditer(template)}
    return template.format(
        *(
            text if place in inside or is_atom(text) else f"({text})"
            for place, text in enumerate(texts)
        )
    )


def is_atom(text: str) -> bool:
    """Return whether a text needs no parentheses as an operand."""
    if not _ATOM.match(text):
        return False
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter == ")" and place + 1 < len(text):
            return False
    return True


def camel(name: str) -> str:
    """Return the name of a type for a value's name."""
    words = "".join(word[:1].upper() + word[1:] for word in name.split("_"))
    return words if words[:1].isalpha() else f"T{words}"


def filled_list(head: str, entries: Sequence[str], tail: str) -> list[str]:
    """Return the lines of a list in which no entry is broken, further ones under the first."""
    text = head.replace(" ", "\0") + ", ".join(entry.replace(" ", "\0") for entry in entries)
    lines = filled(text + tail.replace(" ", "\0"), "", " " * len(head))
    return [line.replace("\0", " ") for line in lines]


def filled(text: str, margin: str, further: str) -> list[str]:
    """Return the lines of a text, the first behind ``margin`` and the others behind ``further``."""
    return textwrap.wrap(
        text,
        100,
        initial_indent=margin,
        subsequent_indent=further,
        break_long_words=False,
        break_on_hyphens=False,
    )
