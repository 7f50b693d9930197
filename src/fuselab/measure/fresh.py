"""Fresh processes whose allocator keeps its memory, since page faults bias timings on the CPU.

With glibc's defaults every call may map a tensor above 128 KiB afresh, and the page faults make one
process 4 to 6 times slower than another (measured on 2 cores, 4096 x 1024 float32). With both
thresholds out of reach, freed memory is kept and reused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import fuselab

PINNED_ALLOCATION = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 32),
}


def allocation_is_pinned() -> bool:
    """Return whether this process was started with the allocator keeping its memory."""
    return all(os.environ.get(name) == value for name, value in PINNED_ALLOCATION.items())


def run_pinned(module: str, arguments: Sequence[str]) -> int:
    """Run ``python -m module arguments`` in a fresh process with pinned allocation.

    Its output goes to ours; returns its exit status.
    """
    environment = child_environment(**PINNED_ALLOCATION)
    return subprocess.run([sys.executable, "-m", module, *arguments], env=environment).returncode


def child_environment(**changes: str) -> dict[str, str]:
    """Return our environment with ``changes``; the child imports this fuselab, installed or not."""
    source_root = str(Path(fuselab.__file__).resolve().parents[1])
    search_path = os.pathsep.join(filter(None, [source_root, os.environ.get("PYTHONPATH")]))
    return {**os.environ, **changes, "PYTHONPATH": search_path}
