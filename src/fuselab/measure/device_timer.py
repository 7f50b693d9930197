"""The timer for a device: CUDA events on a GPU, the wall clock on a CPU."""

from __future__ import annotations

import torch

from fuselab.measure.cpu_timer import CpuTimer
from fuselab.measure.cuda_timer import CudaTimer
from fuselab.measure.timer import Call, Timer


def timer(call: Call, device: torch.device, *, cold: bool = True, graph: bool = False) -> Timer:
    """Return a warmed timer of ``call`` on ``device``.

    ``cold`` evicts the last-level cache before every call; ``graph`` replays the call from a CUDA
    graph, which removes launch gaps (CUDA only).
    """
    if device.type == "cuda":
        return CudaTimer(call, device, cold=cold, graph=graph)
    return CpuTimer(call, cold=cold)
