"""Fold long lines of generated Python, as a formatter would."""

from __future__ import annotations

import ast
import re
import textwrap

COLUMNS = 100


def fold(line: str) -> list[str]:
    """Return a line of code in lines of at most 100 columns."""
    if len(line) <= COLUMNS:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    end = _closing(line)
    if line.lstrip().startswith("def ") and "->" in line:
        end = line.rindex(")", 0, line.rindex("->"))
    if end is None:
        name, _, value = line.partition(" = ")
        if not value:
            name, value = "", line.strip()
        returned = "return " * value.startswith("return ")
        value = value.removeprefix("return ")
        value, comma = value.removesuffix(","), "," * value.endswith(",")
        parts = _split(value, (" + ", " - ")) or _split(value, (" * ", " / "))
        if not parts:
            return [line]
        first = f"{name} = (" if name else f"{indent}{returned}("
        return [first, *(f"{indent}    {part}" for part in parts), f"{indent}){comma}"]
    begin = _opening(line, end)
    head, body, tail = line[: begin + 1], line[begin + 1 : end], line[end:]
    is_group = not re.search(r"[\w\])]$", line[:begin]) and not _split(body, (", ",))
    if is_group:  # a comma would make it a tuple
        folded = fold(f"{indent}    {body}")
        if folded[0] == f"{indent}    (" and folded[-1] == f"{indent}    )":  # one pair is enough
            folded = [part[4:] for part in folded[1:-1]]
        return [head, *folded, f"{indent}{tail}"]
    if len(indent) + 4 + len(body) <= COLUMNS:
        return [head, f"{indent}    {body}", f"{indent}{tail}"]
    items = _split(body, (", ",)) or [body]
    if all(re.fullmatch(r"[\w.-]+,?", item.strip()) for item in items):
        inner = f"{indent}    "
        wrapped = textwrap.wrap(body, COLUMNS, initial_indent=inner, subsequent_indent=inner)
        return [head, *wrapped, f"{indent}{tail}"]
    lines = [fold(f"{indent}    {item.strip().rstrip(',')},") for item in items]
    return [head, *(one for part in lines for one in part), f"{indent}{tail}"]


def _closing(line: str) -> int | None:
    """Return the place where the longest parentheses close of those that stand outside all others
    and that only a method or an attribute follows."""
    if not re.search(r"\)[\w.()\[\], :]*$", line):
        return None
    depth, begin, longest, found = 0, 0, -1, None
    for place, letter in enumerate(line):
        if letter == "(" and depth == 0:
            begin = place
        depth += (letter == "(") - (letter == ")")
        is_end = len(line) - place <= 40 and " " not in line[place:].strip()
        if letter == ")" and depth == 0 and is_end and place - begin > longest:
            longest, found = place - begin, place
    return found


def _opening(line: str, end: int) -> int:
    depth = 0
    for place in range(end, -1, -1):
        depth += (line[place] == ")") - (line[place] == "(")
        if depth == 0:
            return place
    return 0


def _split(text: str, separators: tuple[str, ...]) -> list[str]:
    """Return the text split before operators, or behind commas, outside of parentheses; empty if
    there are none."""
    parts, begin, depth = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "([{") - (letter in ")]}")
        for separator in separators:
            if depth == 0 and place > begin and text.startswith(separator, place):
                after = place + 1
                parts.append(text[begin:after].strip() if separator != ", " else text[begin:after])
                begin = after if separator != ", " else place + 2
    parts.append(text[begin:].strip())
    return parts if len(parts) > 1 else []


def formatted(text: str) -> str:
    """Return Python text with its long lines folded, and with the import of ``math`` where it is
    used."""
    lines = "\n".join(line for long in text.split("\n") for line in _folded(long))
    if "math." not in lines or re.search(r"^\s*import math\b", lines, re.M):
        return lines
    names = (node.id for node in ast.walk(ast.parse(lines)) if isinstance(node, ast.Name))
    if "math" not in names:
        return lines  # in a docstring, or of another module
    head, future, rest = lines.partition("from __future__ import annotations\n\n")
    if not future:
        return lines
    is_with_others = re.match(r"(from|import) (collections|functools|typing|pathlib)\b", rest)
    return f"{head}{future}import math\n{'' if is_with_others else chr(10)}{rest}"


def _folded(line: str) -> list[str]:
    """Return a line folded, or as it is where that would be other code: a comment, statements of
    the user's code that share a line, or a key of a dict, which is a string."""
    if re.match(r'\s*"[^"]*": \($', line):
        return [line]
    lines = fold(line)
    # A line may be an item of a dict, whose key is a string with operators in it.
    is_item = re.match(r'\s*"[^"]*": .*,$', line) is not None
    head, tail = ("{", "}") if is_item else ("", " pass" if line.rstrip().endswith(":") else "")
    try:
        wanted = ast.dump(ast.parse(f"{head}{line.strip()}{tail}"))
    except SyntaxError:  # a part of a statement
        return lines
    try:
        text = textwrap.dedent("\n".join(lines))
        found = ast.dump(ast.parse(f"{head}{text}{tail}"))
    except SyntaxError:
        return [line]
    return lines if found == wanted else [line]
