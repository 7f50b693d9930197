"""Compile for a survey's points side by side, before the first is timed.

Compiling takes most of a survey: for a point, torch.compile and the kernels' compilers take
seconds, and its timing less than one. Processes that call every provider once, each at its share of
the points, leave what they compile in the caches on disk, where the process that times finds it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

CHILD = "fuselab.prove.survey_rehearsal"  # it imports the survey, which imports this
LEAST_POINTS = 4  # of fewer, the start of the processes takes longer than they save
_MOST_PROCESSES = 16
_BYTES_EACH = 4 << 30  # of the GPU's memory, for a process and a point's tensors


def processes(device: torch.device) -> int:
    """Return how many processes may compile ahead on this machine: none without a GPU, where they
    would need the memory and the cores of the one that times."""
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    cores = len(os.sched_getaffinity(0)) - 1
    return max(0, min(_MOST_PROCESSES, cores, free // _BYTES_EACH))


def compile_ahead(
    asked: dict[str, Any],
    points: Sequence[int],
    count: int,
    progress: Callable[[str], None] = lambda text: None,
) -> None:
    """Let up to ``count`` processes compile for the points, and return when all have ended.

    ``asked`` are the arguments of ``survey_rehearsal.rehearse`` but the points. What fails there
    fails again when the point is timed, and is reported then.
    """
    count = min(count, len(points))
    if count < 2 or len(points) < LEAST_POINTS:
        return
    progress(f"compiling for {len(points)} points in {count} processes")
    environment = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
    shares = [list(points[place::count]) for place in range(count)]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", CHILD, json.dumps({**asked, "points": share})],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for share in shares
    ]
    try:
        for process in started:
            process.wait()
    finally:
        for process in started:
            process.kill()
