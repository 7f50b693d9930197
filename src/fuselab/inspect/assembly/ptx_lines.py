"""The source line of each line of a PTX text, calls that were inlined included."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(.*)")
# Triton says the calls in a comment, innermost first; CUDA's compiler in the directive itself.
_CALLERS = re.compile(r"@\[ ([^:\s]+):(\d+):\d+")
_INLINED_AT = re.compile(r"inlined_at (\d+) (\d+) (\d+)")

_Spot = tuple[int, int, int]  # file, line, column


@dataclass(frozen=True)
class Place:
    """A line of a source file."""

    file: str
    line: int


def places(ptx: str) -> list[Place | None]:
    """Return, for each line of the text, the line of the kernel's own source that it computes.

    Code of a function that was inlined belongs to the line that calls it: Triton's own functions
    such as ``tl.sum`` to the kernel's line. Lines count from 1, so the first item is unused.
    """
    files = {int(number): name for number, name in _FILE.findall(ptx)}
    by_name = {name.rsplit("/", 1)[-1]: name for name in files.values()}
    callers: dict[_Spot, _Spot] = {}
    found: list[Place | None] = [None]
    now: Place | None = None
    for row in ptx.splitlines():
        match = _LOC.match(row)
        if match is not None:
            now = _outermost(match, files, by_name, callers) or now
        elif ".entry" in row or ".func" in row:
            now = None
        found.append(now)
    return found


def _outermost(
    match: re.Match[str],
    files: dict[int, str],
    by_name: dict[str, str],
    callers: dict[_Spot, _Spot],
) -> Place | None:
    named = _CALLERS.findall(match[4])
    if named:
        name, line = named[-1]
        return Place(by_name.get(name, name), int(line))
    spot = int(match[1]), int(match[2]), int(match[3])
    inlined = _INLINED_AT.search(match[4])
    if inlined is not None:
        callers[spot] = int(inlined[1]), int(inlined[2]), int(inlined[3])
    seen = {spot}
    while spot in callers and callers[spot] not in seen:
        spot = callers[spot]
        seen.add(spot)
    return Place(files.get(spot[0], ""), spot[1]) if spot[1] else None
