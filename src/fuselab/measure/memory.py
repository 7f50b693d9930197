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
    """Return the most bytes that one call held at once, its output included, above those allocated
    before it.

    On CUDA this is the caching allocator's own peak. On the CPU it is the running sum of the
    allocations and releases that torch's allocator reports to the profiler; memory that C++ code
    allocates otherwise is not counted.
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
    """Discard everything written to stderr.

    torch 2.13's profiler writes two lines there per use, and no log level silences them.
    """
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
    """Fill the free memory that a call's outputs will probably get with values no kernel returns.

    Tensors like each output are filled (NaN, the least integer, or True) and released. An allocator
    reuses a block of the same size, so an unwritten output shows. Small outputs need more such
    tensors, because malloc keeps several free blocks that fit, and an earlier call's right output
    may be in one of them.
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
