"""Host latency: the time a call keeps the Python thread busy before it returns."""

from __future__ import annotations

from time import perf_counter

import torch

from fuselab.measure.cpu_timer import WARM_UP_CALLS, time_calls_us, without_garbage_collection
from fuselab.measure.timer import Call

SAMPLES = 25
FEWEST_SAMPLES = 3
# Enough calls to drown the clock, few enough that the launch queue (about 1000) never fills and
# makes the host wait for the device.
CALLS_PER_SAMPLE = 40
LONGEST_SAMPLE_US = 10_000.0


def host_latency_samples_us(
    call: Call, device: torch.device, budget_s: float = 0.25
) -> tuple[list[float], int]:
    """Host microseconds per call, one mean per sample (up to 25 within the budget, at least 3), and
    the number of calls in each sample.

    On CUDA this is the enqueue time: the device is idle when a sample starts and is waited for
    after its clock stopped. On the CPU there is no queue: it is the warm wall time of the call.
    """
    for _ in range(WARM_UP_CALLS):
        call()
    _wait(device)
    estimate_us = max(time_calls_us(call, 1), 0.01)
    _wait(device)
    calls = max(1, min(CALLS_PER_SAMPLE, round(LONGEST_SAMPLE_US / estimate_us)))
    taken: list[float] = []
    deadline = perf_counter() + budget_s
    with without_garbage_collection():
        while len(taken) < FEWEST_SAMPLES or (len(taken) < SAMPLES and perf_counter() < deadline):
            taken.append(time_calls_us(call, calls))
            _wait(device)
    return taken, calls


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
