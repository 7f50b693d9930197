"""Capture of a call in a CUDA graph, and the clean-up if the capture fails."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def captured(
    run: Callable[[], Result], device: torch.device, error_mode: str = "global"
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture ``run`` in a CUDA graph; return the graph and what ``run`` returned.

    Every replay writes the returned tensors again. ``run`` must be warm and must not synchronise.
    ``error_mode`` is CUDA's: with ``"thread_local"`` other threads may do what a capture forbids,
    as those that watch NCCL do.
    An exception of ``run`` or of the capture is raised again after the capture has been ended on
    the stream where it began; allocations, random numbers and captures then work as before.
    """
    torch.cuda.synchronize(device)
    gc.collect()  # objects that hold CUDA resources must not be destroyed during the capture
    torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=error_mode)
            try:
                result = run()
            except BaseException:
                torch.cuda.set_stream(stream)
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            torch.cuda.set_stream(stream)  # the call may have left another stream current
            graph.capture_end()
    except BaseException:
        _broken_captures.append(graph)
        _mend_after_a_capture(pool, device)
        raise
    return graph, result


# kept alive because the allocator still calls back into them
_broken_captures: list[torch.cuda.CUDAGraph] = []


def _mend_after_a_capture(pool: Any, device: torch.device) -> None:
    """End what a failed capture left open: the allocator's pool and the random generator's
    recording.

    A small sound capture follows, because the end of any sound capture ends that recording.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index or 0, pool)
    with contextlib.suppress(RuntimeError):
        torch.cuda.synchronize(device)
    with contextlib.suppress(RuntimeError):
        value = torch.zeros(1, device=device)
        sound, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
        with torch.cuda.stream(stream):
            sound.capture_begin()
            value.add_(1)
            sound.capture_end()
