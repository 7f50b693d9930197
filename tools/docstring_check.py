"""Refuse docstrings that begin in mid-sentence: with "Of", "What", "Without" and the like.

    python tools/docstring_check.py

Such a docstring can only be understood together with the name above it. The files named in
``tools/docstring_exempt.txt`` may still hold some. The list can only shrink: a file whose
docstrings are all right must leave it, and only files of ``EXEMPT_FOLDERS`` may be on it. The exit
status is 1 if anything is refused.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "tools", "examples", "benchmarks")
EXEMPT = "tools/docstring_exempt.txt"
EXEMPT_FOLDERS = ("src/fuselab/ops/", "src/fuselab/runtime/")
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
    """Return one line of text for everything that is wrong under a repository's root."""
    lines = (root / EXEMPT).read_text().splitlines()
    exempt = {line for line in lines if line and not line.startswith("#")}
    found = [
        f"{EXEMPT}: {name} is in none of {', '.join(EXEMPT_FOLDERS)}"
        for name in sorted(exempt)
        if not name.startswith(EXEMPT_FOLDERS)
    ]
    needed = set()
    for path in sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py")):
        name = path.relative_to(root).as_posix()
        for line, word in sorted(refused(path.read_text(encoding="utf-8"))):
            needed.add(name)
            if name not in exempt:
                found.append(f'{name}:{line}: the docstring begins with "{word}"')
    found += [
        f"{EXEMPT}: {name} needs no exemption: remove its line" for name in sorted(exempt - needed)
    ]
    return found


def main() -> int:
    found = complaints(REPOSITORY)
    for line in found:
        print(line)
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
