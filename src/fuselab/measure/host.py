"""Host latency: the time a call keeps the Python thread busy before it returns."""

from __future__ import annotations

from time import perf_counter

import torch

from fuselab.measure.cpu_timer import WARM_UP_CALLS, time_calls_us, without_garbage_collection
from fuselab.measure.timer import Call

SAMPLES = 25
FEWEST_SAMPLES = 3
# The calls are enough to make the clock's cost negligible, and few enough that the launch queue
# (about 1000) never fills and makes the host wait for the device.
CALLS_PER_SAMPLE = 40
LONGEST_SAMPLE_US = 10_000.0


class HostTimer:
    """Host microseconds per call.

    On CUDA this is the enqueue time: the device is idle when a sample starts, and the wait for it
    comes after the clock stopped. The CPU has no queue, so there it is the warm wall time of the
    call.
    """

    page_faults_per_call = None

    def __init__(self, call: Call, device: torch.device) -> None:
        self._call, self._device = call, device
        for _ in range(WARM_UP_CALLS):
            call()
        self._wait()
        estimate_us = max(time_calls_us(call, 1), 0.01)
        self._wait()
        self.calls = max(1, min(CALLS_PER_SAMPLE, round(LONGEST_SAMPLE_US / estimate_us)))

    @property
    def method(self) -> str:
        return "enqueue time" if self._device.type == "cuda" else "warm wall time"

    def sample(self) -> float:
        elapsed_us = time_calls_us(self._call, self.calls)
        self._wait()
        return elapsed_us

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def host_latency_samples_us(
    call: Call, device: torch.device, budget_s: float = 0.25
) -> tuple[list[float], int]:
    """Return host microseconds per call, one mean per sample (up to 25 within the budget, at least
    3), and the number of calls in each sample."""
    clock = HostTimer(call, device)
    taken: list[float] = []
    deadline = perf_counter() + budget_s
    with without_garbage_collection():
        while len(taken) < FEWEST_SAMPLES or (len(taken) < SAMPLES and perf_counter() < deadline):
            taken.append(clock.sample())
    return taken, clock.calls
