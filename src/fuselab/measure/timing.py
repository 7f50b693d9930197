"""``fuselab.time``: how long one call takes, and how certain that is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn

from fuselab.errors import ArgumentError, ArgumentTypeError, DeviceError
from fuselab.measure.cpu_timer import without_garbage_collection
from fuselab.measure.device_timer import timer
from fuselab.measure.host import host_latency_samples_us
from fuselab.measure.statistics import median_interval, quantiles
from fuselab.notebook import ShownInNotebooks

FEWEST_SAMPLES = 6  # the fewest whose range covers the median with 95 % confidence
MOST_SAMPLES = 2000
MODES = ("device", "host")


@dataclass(frozen=True)
class Timing(ShownInNotebooks):
    """The time of a call, in microseconds.

    The interval ``low_us`` to ``high_us`` contains the true median with 95 % confidence;
    ``quantiles`` (p05, p25, p75, p95) describe the spread. ``repeats`` samples were taken, each the
    mean of ``calls_per_repeat`` calls. ``host_us`` is the host's own time per call: the enqueue
    time on CUDA, the warm wall time on the CPU. ``page_faults_per_call`` is known only for device
    time on the CPU, otherwise None.
    """

    median_us: float
    low_us: float
    high_us: float
    quantiles: Mapping[str, float]
    repeats: int
    calls_per_repeat: int
    host_us: float
    device: str
    mode: str
    method: str
    page_faults_per_call: float | None

    def __str__(self) -> str:
        text = (
            f"{self.median_us:.2f} us ({self.low_us:.2f} to {self.high_us:.2f}), "
            f"host {self.host_us:.2f} us; median of {self.repeats} x {self.calls_per_repeat} "
            f"calls, {self.method}, {self.device}"
        )
        if self.page_faults_per_call and self.page_faults_per_call >= 1:
            text += (
                f"; {self.page_faults_per_call:.0f} page faults per call: fresh memory is part of "
                "this figure"
            )
        return text

    __repr__ = __str__


def time(
    fn: Callable[..., Any],
    *args: Any,
    device: torch.device | str | None = None,
    mode: str = "device",
    cold: bool = True,
    graph: bool = False,
    budget_s: float = 0.5,
) -> Timing:
    """Time ``fn(*args)``; bind keyword arguments with ``functools.partial``.

    ``device`` is where the work runs; by default that of the first tensor among ``args`` or of
    ``fn``'s parameters, else CUDA where there is one. ``mode="device"`` is the time the device
    works (CUDA events; the wall clock on the CPU), ``mode="host"`` the time the call keeps Python
    busy. ``cold`` evicts the last-level cache before each call, ``graph`` replays the call from a
    CUDA graph. Samples are taken for about ``budget_s`` seconds, at least 6.

    Raises ArgumentError for an unknown mode or a graph on the CPU, ArgumentTypeError if ``fn``
    cannot be called, DeviceError if the device is not there.
    """
    if not callable(fn):
        raise ArgumentTypeError(
            f"fn is of type {type(fn).__name__}; give what is called: time(fn, x)."
        )
    if mode not in MODES:
        raise ArgumentError(f"mode is '{mode}'; it must be one of {', '.join(MODES)}.")
    where = _device(device, fn, args)
    if graph and where.type != "cuda":
        raise ArgumentError("graph=True replays a CUDA graph; it needs device='cuda'.")
    call = partial(fn, *args)
    host, host_calls = host_latency_samples_us(call, where)
    if mode == "host":
        method = "enqueue time" if where.type == "cuda" else "warm wall time"
        return _timing(host, host_calls, host, where, mode, method, None)
    clock = timer(call, where, cold=cold, graph=graph)
    samples: list[float] = []
    deadline = perf_counter() + budget_s
    with without_garbage_collection():
        while len(samples) < FEWEST_SAMPLES or (
            len(samples) < MOST_SAMPLES and perf_counter() < deadline
        ):
            samples.append(clock.sample())
    return _timing(
        samples, clock.calls, host, where, mode, clock.method, clock.page_faults_per_call
    )


def _timing(
    samples: list[float],
    calls: int,
    host: list[float],
    device: torch.device,
    mode: str,
    method: str,
    page_faults: float | None,
) -> Timing:
    middle, low, high = median_interval(samples)
    return Timing(
        median_us=middle,
        low_us=low,
        high_us=high,
        quantiles=quantiles(samples),
        repeats=len(samples),
        calls_per_repeat=calls,
        host_us=median(host),
        device=str(device),
        mode=mode,
        method=method,
        page_faults_per_call=page_faults,
    )


def _device(
    device: torch.device | str | None, fn: Callable[..., Any], args: Iterable[Any]
) -> torch.device:
    if device is not None:
        where = torch.device(device)
    else:
        owned = list(fn.parameters())[:1] if isinstance(fn, nn.Module) else []
        tensors = [*(value for value in args if isinstance(value, Tensor)), *owned]
        if tensors:
            return tensors[0].device
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if where.type == "cuda" and not torch.cuda.is_available():
        raise DeviceError("device='cuda' was asked for, but torch sees no CUDA device here.")
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    return where
