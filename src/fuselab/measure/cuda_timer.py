"""Device time of a call on CUDA, by events: the time the device works, without launch gaps.

A spinning kernel first holds the device while the host enqueues a whole batch, so that the host's
own speed does not affect the result (``measure.host`` measures it). A cold call finds the L2
evicted: a buffer of twice its size is written before each call, outside the two events. Events
resolve about 0.5 us (CUDA runtime API, event management), so one reading of a 5 us kernel is off by
up to 10 %. A sample is therefore the mean of as many calls as bring that under 0.5 %.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import repeat
from time import perf_counter_ns

import torch

from fuselab.measure.cuda_graph import captured
from fuselab.measure.timer import Call

WARM_UP_CALLS = 3
RESOLUTION_US = 0.5
RELATIVE_RESOLUTION = 0.005
# A batch with its flushes and events must fit in the launch queue (about 1000 entries), otherwise
# the host waits for the device in the middle of it.
MOST_CALLS = 100
LONGEST_HOLD_US = 50_000.0
HOLD_ATTEMPTS = 4


@lru_cache
def flush_buffer(device: torch.device) -> torch.Tensor:
    """Return a buffer of twice the L2 of ``device``, to be overwritten."""
    bytes_ = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    return torch.empty(bytes_ // 4, dtype=torch.int32, device=device)


@lru_cache
def _cycles_per_us(device: torch.device) -> float:
    """Return how many clock cycles ``torch.cuda._sleep`` spins per microsecond.

    The shortest of five measurements counts, because a GPU shared with other processes serves each
    in turn.
    """
    cycles, shortest_ms = 1_000_000, float("inf")
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(40 * cycles)  # about 20 ms, so that an idle GPU raises its clock first
    for _ in range(5):
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        torch.cuda.synchronize(device)
        shortest_ms = min(shortest_ms, start.elapsed_time(end))
    return cycles / (1000 * shortest_ms)


def capture(call: Call, calls: int, device: torch.device) -> torch.cuda.CUDAGraph:
    """Capture ``calls`` calls in a CUDA graph. ``call`` must not synchronise and must be warm."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream(device).wait_stream(side)

    def run() -> None:
        for _ in repeat(None, calls):
            call()

    return captured(run, device)[0]


class CudaTimer:
    """Device time by CUDA events; cold means that every call finds the L2 evicted."""

    page_faults_per_call = None

    def __init__(
        self, call: Call, device: torch.device, *, cold: bool = True, graph: bool = False
    ) -> None:
        self._device, self._cold, self._graph = device, cold, graph
        self._hold_us, self._hold_factor = 1000.0, 1.5
        self._launch_gaps = False
        with torch.cuda.device(device):
            for _ in range(WARM_UP_CALLS):
                call()
            torch.cuda.synchronize()
            self._call, self._calls_per_launch = call, 1
            if graph and cold:
                self._call = capture(call, 1, device).replay
            self.calls = 3
            estimate_us = max(self.sample(), RESOLUTION_US)
            self.calls = self._calls_for(estimate_us)
            if graph and not cold:
                self._call = capture(call, self.calls, device).replay
                self._calls_per_launch = self.calls

    def _calls_for(self, estimate_us: float) -> int:
        wanted_us = RESOLUTION_US / RELATIVE_RESOLUTION
        # A cold call has its own pair of events, whose errors are independent with a standard
        # deviation of resolution / sqrt(12) at each end; the error of their mean falls by
        # sqrt(calls).
        calls = wanted_us / estimate_us
        return max(1, min(MOST_CALLS, round(calls**2 / 6 if self._cold else calls)))

    @property
    def method(self) -> str:
        words = ["CUDA events", "cold L2" if self._cold else "warm L2"]
        if self._graph:
            words.append("replayed from a CUDA graph")
        if self._launch_gaps:
            words.append("launch gaps included, since the call waits for the device")
        return ", ".join(words)

    def sample(self) -> float:
        """Return the microseconds of device time per call.

        If the hold ended before the host had enqueued everything, the hold is doubled and the
        sample is taken again. A call that synchronises can never be held, so the last attempt
        counts, ``method`` says so, and later samples are not held.
        """
        with torch.cuda.device(self._device):
            for _ in range(1 if self._launch_gaps else HOLD_ATTEMPTS):
                elapsed_us, enqueue_us, held = self._held_sample()
                if held:
                    break
                self._hold_factor *= 2
                self._hold_us = self._hold_for(enqueue_us)
            else:
                self._launch_gaps = True
            self._hold_us = 0.0 if self._launch_gaps else self._hold_for(enqueue_us)
            return elapsed_us

    def _hold_for(self, enqueue_us: float) -> float:
        return min(self._hold_factor * enqueue_us + 50, LONGEST_HOLD_US)

    def _held_sample(self) -> tuple[float, float, bool]:
        """Return the device time per call and the host time to enqueue the batch, both in
        microseconds, and whether the hold lasted until the batch was enqueued."""
        pairs = self.calls if self._cold else 1
        starts = [torch.cuda.Event(enable_timing=True) for _ in range(pairs)]
        ends = [torch.cuda.Event(enable_timing=True) for _ in range(pairs)]
        flushed = flush_buffer(self._device) if self._cold else None
        calls_per_pair = 1 if self._cold else max(1, self.calls // self._calls_per_launch)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(self._hold_us * _cycles_per_us(self._device)))
        enqueue_start = perf_counter_ns()
        for start, end in zip(starts, ends, strict=True):
            if flushed is not None:
                flushed.zero_()
            start.record()
            for _ in repeat(None, calls_per_pair):
                self._call()
            end.record()
        enqueue_us = (perf_counter_ns() - enqueue_start) / 1000
        held = not starts[0].query()
        torch.cuda.synchronize()
        total_ms = sum(start.elapsed_time(end) for start, end in zip(starts, ends, strict=True))
        return 1000 * total_ms / self.calls, enqueue_us, held
