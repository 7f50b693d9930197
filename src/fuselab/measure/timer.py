"""The protocol of timers, and the choice of the timer for a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Call = Callable[[], object]


class Timer(Protocol):
    """A timer of one warmed callable on one device.

    ``sample()`` returns microseconds per call, the mean over ``calls`` calls. ``method`` describes
    how, and is complete once a sample was taken. ``page_faults_per_call`` is the mean so far, or
    None where page faults are not counted.
    """

    calls: int

    def sample(self) -> float: ...

    @property
    def method(self) -> str: ...

    @property
    def page_faults_per_call(self) -> float | None: ...


def timer(call: Call, device: torch.device, *, cold: bool = True, graph: bool = False) -> Timer:
    """Return a warmed timer of ``call``: CUDA events on a CUDA ``device``, else the wall clock.

    ``cold`` evicts the last-level cache before every call; ``graph`` replays the call from a CUDA
    graph, which removes launch gaps (CUDA only).
    """
    if device.type == "cuda":
        from fuselab.measure.cuda_timer import CudaTimer

        return CudaTimer(call, device, cold=cold, graph=graph)
    from fuselab.measure.cpu_timer import CpuTimer

    return CpuTimer(call, cold=cold)
