"""Find what the author of a kernel package still has to fill in: the places that it marks."""

from __future__ import annotations

import re
from pathlib import Path

from fuselab.errors import TargetError

_MARK = re.compile(r"(?:#|//) FILL IN: (.*?)\s*$", re.MULTILINE)


def blanks_in(folder: Path) -> list[str]:
    """Return the places marked ``FILL IN`` in a package's files, each as ``op.py:12 the grid``."""
    found = []
    for file in sorted(folder.iterdir()):
        if file.suffix not in (".py", ".cu", ".cpp") or not file.is_file():
            continue
        text = file.read_text(encoding="utf-8", errors="replace")
        for match in _MARK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(f"{file.name}:{line} {match[1]}")
    return found


def refuse_blanks(folder: Path) -> None:
    """Raise TargetError, which names every place, if a package is not filled in yet."""
    found = blanks_in(folder)
    if found:
        raise TargetError(f"{folder} still has to be filled in: {'; '.join(found)}.")
