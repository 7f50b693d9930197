"""The source line of each line of a PTX text, calls that were inlined included."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fuselab.errors import BuildError
from fuselab.runtime.cuda_source import header_folders

_FILE = re.compile(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', re.M)
_LOC = re.compile(r"^\s*\.loc\s+(\d+) (\d+) (\d+)(.*)")
# Triton says the calls in a comment, innermost first; CUDA's compiler in the directive itself.
_CALLERS = re.compile(r"@\[ ([^:\s]+):(\d+):\d+")
_INLINED_AT = re.compile(r"inlined_at (\d+) (\d+) (\d+)")
_LIBRARY = re.compile(r"/triton/(?:language|experimental|tools|backends)/|/site-packages/nvidia/")

_Spot = tuple[int, int, int]  # file, line, column


@dataclass(frozen=True)
class Place:
    """A line of a source file."""

    file: str
    line: int


def places(ptx: str) -> list[Place | None]:
    """Return, for each line of the text, the line of the user's source that it computes.

    Code of a function that was inlined belongs to the function's own line if the function is the
    user's. Code of a library's function, such as ``tl.sum`` or ``__hfma2``, belongs to the line
    that calls it. Lines count from 1, so the first item is unused.
    """
    files = {int(number): name for number, name in _FILE.findall(ptx)}
    # a user's file may have the name of one of Triton's
    ranked = sorted(files.values(), key=is_library, reverse=True)
    by_name = {name.rsplit("/", 1)[-1]: name for name in ranked}
    callers: dict[_Spot, _Spot] = {}
    found: list[Place | None] = [None]
    now: Place | None = None
    for row in ptx.splitlines():
        match = _LOC.match(row)
        if match is not None:
            now = _own(_frames(match, files, by_name, callers)) or now
        elif ".entry" in row or ".func" in row:
            now = None
        found.append(now)
    return found


@functools.lru_cache(maxsize=256)
def is_library(file: str) -> bool:
    """Return whether a source file is Triton's own, or one of CUDA's headers."""
    if _LIBRARY.search(file):
        return True
    try:
        return any(Path(file).is_relative_to(folder) for folder in header_folders())
    except BuildError:  # no headers, so that nothing includes them
        return False


def _own(frames: Sequence[Place]) -> Place | None:
    """Return the innermost line outside of libraries; the outermost one if there is no other."""
    found = next((one for one in frames if not is_library(one.file)), None)
    return found or (frames[-1] if frames else None)


def _frames(
    match: re.Match[str],
    files: dict[int, str],
    by_name: dict[str, str],
    callers: dict[_Spot, _Spot],
) -> list[Place]:
    """Return the line of a directive and those of the calls around it, the innermost first; lines
    that the compiler does not know are left out."""
    spot = int(match[1]), int(match[2]), int(match[3])
    inlined = _INLINED_AT.search(match[4])
    if inlined is not None:
        callers[spot] = int(inlined[1]), int(inlined[2]), int(inlined[3])
    spots = [spot]
    while spots[-1] in callers and callers[spots[-1]] not in spots:
        spots.append(callers[spots[-1]])
    found = [Place(files.get(file, ""), line) for file, line, _ in spots if line]
    named = [Place(by_name.get(name, name), int(line)) for name, line in _CALLERS.findall(match[4])]
    return [*found, *named]
