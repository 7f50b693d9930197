"""A CUDA graph of a call that may fail to be captured, and the mend where it does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def captured(
    run: Callable[[], Result], device: torch.device
) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A graph of ``run``, and what it returned, which every replay writes again.

    ``run`` must be warm and must not synchronise. Raises what it or the end of the capture raises,
    after the capture was ended on the stream it began on; allocations, random numbers and captures
    work as before then.
    """
    torch.cuda.synchronize(device)
    gc.collect()  # what holds CUDA objects may not be destroyed while capturing
    torch.cuda.empty_cache()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    pool = torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool)
            try:
                result = run()
            except BaseException:
                torch.cuda.set_stream(stream)
                with contextlib.suppress(RuntimeError):
                    graph.capture_end()
                raise
            torch.cuda.set_stream(stream)  # the call may have left another one
            graph.capture_end()
    except BaseException:
        _broken_captures.append(graph)
        _mend_after_a_capture(pool, device)
        raise
    return graph, result


_broken_captures: list[torch.cuda.CUDAGraph] = []  # the allocator still calls back into them


def _mend_after_a_capture(pool: Any, device: torch.device) -> None:
    """End what a failed capture leaves begun: the allocator's pool and the random generator's
    recording, which the end of any sound capture ends."""
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
