"""Peak memory of one call above what was allocated before it, and poison for free memory."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from fuselab.measure.timer import Call


def peak_bytes(call: Call, device: torch.device) -> int:
    """Most bytes that one call held at once above those allocated before it, its output included.

    CUDA: the caching allocator's own peak. CPU: the allocations and releases that torch's allocator
    reports to the profiler, summed in order; memory that C++ takes behind its back is not seen.
    """
    if device.type == "cuda":
        return _peak_bytes_cuda(call, device)
    with _quiet_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        output = call()
        del output
    with tempfile.TemporaryDirectory(prefix="fuselab-") as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    changes = [event for event in events if event.get("name") == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: (event["ts"], event["args"]["Ev Idx"])):
        held += change["args"]["Bytes"]
        peak = max(peak, held)
    return peak


@contextmanager
def _quiet_stderr() -> Iterator[None]:
    """Nothing reaches stderr: torch 2.13's profiler writes two lines there per use, and no log
    level silences them."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _peak_bytes_cuda(call: Call, device: torch.device) -> int:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    output = call()
    torch.cuda.synchronize(device)
    del output
    return torch.cuda.max_memory_allocated(device) - before


def poison(outputs: Sequence[Tensor]) -> None:
    """Fills free memory that a call's outputs will probably get with values no kernel returns.

    Tensors like each output are filled (NaN, or the least integer) and released: an allocator hands
    a block of the same size out again, so an output left unwritten shows. Of small ones there are
    more: malloc keeps several free places that fit, an earlier call's right output in one of them.
    """
    filled = []
    for output in outputs:
        for _ in range(16 if output.nbytes <= 1 << 20 else 2):
            tensor = torch.empty_like(output)
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.fill_(float("nan"))
            elif tensor.dtype == torch.bool:
                tensor.fill_(True)
            else:
                tensor.fill_(torch.iinfo(tensor.dtype).min)
            filled.append(tensor)
    del filled
