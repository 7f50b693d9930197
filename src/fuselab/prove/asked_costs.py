"""A procedure for the process that holds the reference: what a call costs in time and memory."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuselab.prove.held import results

_STATUS, _CLEAR, _AVAILABLE = (
    Path(name) for name in ("/proc/self/status", "/proc/self/clear_refs", "/proc/meminfo")
)
_CLEAR_PEAK = "5"  # what resets the peak of a process's memory (man 5 proc)


def cost_of_results(function: Callable[..., Any], *values: Any) -> tuple[float, float]:
    """Return the seconds that a call takes once it has been made before, and the share of the
    machine's free memory that it adds to the process's at its peak; 0 where the system tells
    neither peak nor free memory, or the work is a GPU's."""
    results(function, *values)
    begin = time.monotonic()
    before = _kibibytes(_STATUS, "VmRSS") if _peak_is_cleared() else None
    found = results(function, *values)
    seconds = time.monotonic() - begin
    del found
    peak, free = _kibibytes(_STATUS, "VmHWM"), _kibibytes(_AVAILABLE, "MemAvailable")
    if before is None or peak is None or not free:
        return seconds, 0.0
    return seconds, max(peak - before, 0) / free


def _peak_is_cleared() -> bool:
    try:
        _CLEAR.write_text(_CLEAR_PEAK)
    except OSError:
        return False
    return True


def _kibibytes(path: Path, name: str) -> int | None:
    """Return a field of a file of the proc file system, in KiB; None where there is none."""
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB", path.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else int(found[1])
