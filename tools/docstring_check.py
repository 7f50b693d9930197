"""Refuse docstrings that begin in mid-sentence: with "Of", "What", "Without" and the like.

    python tools/docstring_check.py

Such a docstring can only be understood together with the name above it. The exit status is 1 if
any is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tools", "examples", "benchmarks")
REFUSED = frozenset({"of", "that", "what", "as", "without", "where"})


def refused(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the first word of every refused docstring of a file's text."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        word = re.match(r"\W*(\w+)", ast.get_docstring(node) or "")
        if word and word[1].lower() in REFUSED:
            yield node.body[0].lineno, word[1]


def complaints(root: Path) -> list[str]:
    """Return one line of text for every refused docstring under a repository's root."""
    return [
        f'{path.relative_to(root).as_posix()}:{line}: the docstring begins with "{word}"'
        for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
        for line, word in sorted(refused(path.read_text(encoding="utf-8")))
    ]


def main() -> int:
    found = complaints(REPOSITORY)
    for line in found:
        print(line)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
