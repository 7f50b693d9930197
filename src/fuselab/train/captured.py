"""A training step in one CUDA graph: warmed, captured once, replayed without a host sync."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fuselab.measure.cuda_graph import captured

_WARM_UPS = 3  # kernels are built, libraries allocate their workspaces, launches become plans


class Captured:
    """The capture of ``work``; calling it replays.

    ``work`` must read and write the same memory every time. It runs while it is warmed up, and its
    caller must make sure that this changes no state. ``error_mode`` is that of ``captured``.
    """

    def __init__(
        self, work: Callable[[], None], device: torch.device, error_mode: str = "global"
    ) -> None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                work()
        torch.cuda.current_stream(device).wait_stream(stream)
        self.graph, _ = captured(work, device, error_mode)

    def __call__(self) -> None:
        self.graph.replay()
