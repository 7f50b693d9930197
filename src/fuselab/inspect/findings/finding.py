"""One finding: a change that a profile suggests, with the line and the time it would save."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Finding:
    """One thing to change. ``kind`` is one of a closed set (docs/profile.md)."""

    kind: str
    title: str
    advice: str
    line: str | None  # short, as file:line
    file: str | None
    line_number: int | None
    source: str  # the text of the line
    saved_us: float
    share: float
    calls: float
    bytes_saved: int = 0
    operators: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()  # all lines of a chain, each once; ``line`` is the first

    def describe(self) -> dict[str, Any]:
        return asdict(self)
