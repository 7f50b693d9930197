"""Wall time of a call on the CPU, with the cache cold or warm, and its page faults."""

from __future__ import annotations

import gc
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import repeat
from time import perf_counter_ns

import torch

from fuselab.measure.timer import Call

WARM_UP_CALLS = 3
# The clock resolves about 30 ns and costs about as much; in a sample of 20 us both stay under
# 0.5 %.
SHORTEST_SAMPLE_US = 20.0
MOST_COLD_CALLS = 4  # every cold call needs a cache flush of about 5 ms


@lru_cache(maxsize=1)
def last_level_cache_bytes() -> int:
    """Return the size of the largest cache that the C library knows, or 32 MiB if it knows none."""
    for name in ("SC_LEVEL3_CACHE_SIZE", "SC_LEVEL2_CACHE_SIZE"):
        if name in os.sysconf_names and os.sysconf(name) > 0:
            return os.sysconf(name)
    return 32 << 20


@lru_cache(maxsize=1)
def _flush_buffer() -> torch.Tensor:
    return torch.ones(2 * last_level_cache_bytes() // 4, dtype=torch.int32)


def flush_cache() -> None:
    """Evict the caches, by reading and writing twice the size of the last level."""
    _flush_buffer().add_(1)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect garbage now, and not while the block runs, because a collection takes
    milliseconds."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def time_calls_us(call: Call, calls: int) -> float:
    """Return the microseconds per call of ``calls`` calls in a row, by the wall clock."""
    start = perf_counter_ns()
    for _ in repeat(None, calls):
        call()
    return (perf_counter_ns() - start) / (1000 * calls)


class CpuTimer:
    """Wall time on the CPU; cold means that every call finds the last-level cache evicted."""

    def __init__(self, call: Call, *, cold: bool = True) -> None:
        self._call, self._cold = call, cold
        self._faults, self._timed_calls = 0, 0
        for _ in range(WARM_UP_CALLS):
            call()
        estimate_us = max(time_calls_us(call, 1), 0.01)
        self.calls = max(1, round(SHORTEST_SAMPLE_US / estimate_us))
        if cold:
            self.calls = min(self.calls, MOST_COLD_CALLS)

    @property
    def method(self) -> str:
        return f"wall clock, {'cold' if self._cold else 'warm'} cache"

    @property
    def page_faults_per_call(self) -> float | None:
        return self._faults / self._timed_calls if self._timed_calls else None

    def sample(self) -> float:
        self._timed_calls += self.calls
        if not self._cold:
            return self._counted(self.calls)
        total_us = 0.0
        for _ in range(self.calls):
            flush_cache()
            total_us += self._counted(1)
        return total_us / self.calls

    def _counted(self, calls: int) -> float:
        before = _page_faults()
        elapsed_us = time_calls_us(self._call, calls)
        self._faults += _page_faults() - before
        return elapsed_us
