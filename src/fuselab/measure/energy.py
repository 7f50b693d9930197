"""Energy of a call: the GPU's own energy counter over a window of back-to-back calls."""

from __future__ import annotations

from time import perf_counter

import torch

from fuselab.errors import MissingDependencyError
from fuselab.measure.timer import Call

WINDOW_S = 0.2
# The counter advances about every 100 ms on the GPUs tried; a window starts and ends when it
# advances.
LONGEST_WAIT_S = 1.0
CHUNK_S = 0.004


def joules_per_call(call: Call, device: torch.device, window_s: float = WINDOW_S) -> float | None:
    """Return the joules that the whole GPU used per call, idle power included; None if unknown.

    Calls run back to back with a warm cache for at least ``window_s`` seconds, from one advance of
    NVML's total energy counter to another. Returns None on the CPU and on GPUs without that counter
    (a MIG slice, an old card). Raises MissingDependencyError without nvidia-ml-py.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        raise MissingDependencyError.of_extra(
            "energy is read with", "nvidia-ml-py", "energy"
        ) from None
    pynvml.nvmlInit()
    try:
        uuid = torch.cuda.get_device_properties(device).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")

        def counter_mj() -> int:
            return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle))

        return _over_window(call, device, counter_mj, window_s)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def _over_window(call: Call, device: torch.device, counter_mj, window_s: float) -> float | None:  # type: ignore[no-untyped-def]
    call()
    torch.cuda.synchronize(device)
    start = perf_counter()
    call()
    torch.cuda.synchronize(device)
    calls_per_chunk = max(1, min(500, int(CHUNK_S / (perf_counter() - start))))

    def run_chunk() -> None:
        for _ in range(calls_per_chunk):
            call()
        torch.cuda.synchronize(device)

    def run_until_move(after_s: float) -> tuple[int, int]:
        """Run chunks until the counter advances after ``after_s`` seconds.

        Returns how many chunks ran, 0 if the counter did not advance, and its reading.
        """
        begin, chunks, known = perf_counter(), 0, counter_mj()
        while perf_counter() - begin < after_s + LONGEST_WAIT_S:
            run_chunk()
            chunks += 1
            reading = counter_mj()
            if perf_counter() - begin >= after_s and reading != known:
                return chunks, reading
            known = reading
        return 0, known

    waited, first = run_until_move(0.0)
    chunks, last = run_until_move(window_s)
    if not waited or not chunks:
        return None
    return (last - first) / 1000 / (chunks * calls_per_chunk)
