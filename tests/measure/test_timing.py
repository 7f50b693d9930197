"""``fuselab.time`` and the CPU's timers."""

from __future__ import annotations

import mmap
from itertools import count
from statistics import median
from time import perf_counter_ns

import pytest
import torch

import fuselab
from fuselab.errors import ArgumentError, DeviceError
from fuselab.measure import cpu_timer
from fuselab.measure.cpu_timer import CpuTimer, flush_cache, last_level_cache_bytes
from fuselab.measure.host import host_latency_samples_us
from fuselab.measure.timing import FEWEST_SAMPLES

CPU = torch.device("cpu")


def busy_ms(duration_ms: float) -> None:
    end = perf_counter_ns() + duration_ms * 1e6
    while perf_counter_ns() < end:
        pass


def test_time_of_a_known_wait() -> None:
    begin = perf_counter_ns()
    timing = fuselab.time(busy_ms, 1.0, device="cpu", budget_s=0.1)
    elapsed_us = (perf_counter_ns() - begin) / 1000
    assert 1000 <= timing.low_us <= timing.median_us <= timing.high_us
    # A neighbour may take the core for a while, and half of the samples took the median or more.
    assert timing.median_us * timing.repeats / 2 < elapsed_us
    assert timing.quantiles["p05"] <= timing.median_us <= timing.quantiles["p95"]
    assert timing.host_us >= 1000
    assert timing.repeats >= FEWEST_SAMPLES and timing.calls_per_repeat == 1
    assert (timing.device, timing.mode, timing.method) == (
        "cpu",
        "device",
        "wall clock, cold cache",
    )


def test_its_text_carries_the_median_its_interval_and_how() -> None:
    timing = fuselab.time(torch.relu, torch.ones(8), cold=False, budget_s=0.01)
    text = repr(timing)
    assert text == str(timing)
    assert f"{timing.median_us:.2f} us ({timing.low_us:.2f} to {timing.high_us:.2f})" in text
    assert "wall clock, warm cache, cpu" in text


@pytest.mark.parametrize(
    ("call_us", "cold", "calls"), [(1, False, 20), (7, False, 3), (50, False, 1), (1, True, 4)]
)
def test_the_shortest_calls_are_batched(
    call_us: int, cold: bool, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sample takes 20 us, by a clock that goes on by ``call_us`` between two looks."""
    monkeypatch.setattr(cpu_timer, "perf_counter_ns", count(0, 1000 * call_us).__next__)
    assert CpuTimer(lambda: None, cold=cold).calls == calls


def test_a_spent_budget_still_gives_the_fewest_samples() -> None:
    assert fuselab.time(torch.relu, torch.ones(8), budget_s=0).repeats == FEWEST_SAMPLES


def test_the_device_is_the_arguments_or_the_modules() -> None:
    assert fuselab.time(torch.nn.Linear(2, 2), torch.ones(1, 2), budget_s=0).device == "cpu"


def test_host_mode_is_the_calls_own_time() -> None:
    timing = fuselab.time(busy_ms, 0.2, device="cpu", mode="host")
    assert timing.median_us == timing.host_us >= 200
    assert timing.mode == "host"


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"mode": "gpu"}, ArgumentError, "mode is 'gpu'; it must be one of device, host"),
        ({"graph": True, "device": "cpu"}, ArgumentError, "needs device='cuda'"),
    ],
)
def test_wrong_options_are_refused(
    options: dict[str, object], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        fuselab.time(torch.relu, torch.ones(1), **options)  # type: ignore[arg-type]


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(ArgumentError, match="fn is of type Tensor"):
        fuselab.time(torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_gpu_is_refused() -> None:
    with pytest.raises(DeviceError, match="no CUDA device"):
        fuselab.time(torch.relu, torch.ones(1), device="cuda")


def test_an_exception_of_the_call_is_the_callers() -> None:
    with pytest.raises(ZeroDivisionError):
        fuselab.time(lambda: 1 / 0, device="cpu")


def test_page_faults_of_fresh_memory_are_counted() -> None:
    size, huge_page = 16 << 20, 2 << 20

    def touch_fresh_memory() -> None:
        with mmap.mmap(-1, size) as memory:
            for offset in range(0, size, mmap.PAGESIZE):
                memory[offset] = 1

    timer = CpuTimer(touch_fresh_memory, cold=False)
    timer.sample()
    assert timer.page_faults_per_call is not None
    assert timer.page_faults_per_call >= size // huge_page

    quiet = CpuTimer(lambda: None, cold=False)
    assert median(_faults_of_one_sample(quiet) for _ in range(5)) == 0


def _faults_of_one_sample(timer: CpuTimer) -> float:
    timer._faults = timer._timed_calls = 0
    timer.sample()
    assert timer.page_faults_per_call is not None
    return timer.page_faults_per_call


def test_a_flush_touches_more_than_the_last_level_cache() -> None:
    from fuselab.measure.cpu_timer import _flush_buffer

    before = int(_flush_buffer()[-1])
    flush_cache()
    assert _flush_buffer().nbytes >= 2 * last_level_cache_bytes() >= 1 << 20
    assert bool((_flush_buffer() == before + 1).all())


def test_a_cold_sample_flushes_before_each_call_and_a_warm_one_never(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(cpu_timer, "perf_counter_ns", count(0, 8000).__next__)  # two calls of 8 us
    monkeypatch.setattr(cpu_timer, "flush_cache", lambda: seen.append("flush"))
    warm, cold = (CpuTimer(lambda: seen.append("call"), cold=cold) for cold in (False, True))
    assert "flush" not in seen  # while it warms up
    seen.clear()
    assert warm.sample() == 4.0 and seen == ["call"] * 2
    seen.clear()
    assert cold.sample() == 8.0 and seen == ["flush", "call"] * 2


def test_host_latency_takes_at_least_three_samples_of_slow_calls() -> None:
    samples, calls = host_latency_samples_us(lambda: busy_ms(12), CPU, budget_s=0)
    assert (len(samples), calls) == (3, 1)
    assert min(samples) >= 12_000
