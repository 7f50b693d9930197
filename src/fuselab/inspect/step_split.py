"""The split of a step's time into compute, memory, overhead and data, which add up to the step.

Every instant of the step belongs to exactly one of them. On a GPU: **compute** while an arithmetic
kernel runs (matrix product, convolution, attention), else **memory** while any other kernel or a
copy within the device runs, else **data** while a copy between host and device runs or the host is
in a range that fetches a batch, else **overhead**: the device waits for the host. On a CPU:
**data** inside a range that fetches a batch, else **compute** inside an arithmetic operator, else
**memory** inside another ATen operator that touches more than 32 KiB, else **overhead**: Python,
dispatch, views, allocations and small operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuselab.inspect.kineto import Kernel, Span, Window
from fuselab.inspect.work_kinds import (
    DATA_RANGE,
    DISPATCH_BYTES,
    is_compute_kernel,
    is_compute_op,
    is_transfer,
    is_work,
)

Interval = tuple[float, float]


@dataclass(frozen=True)
class Split:
    """Microseconds of one step, on average over the recorded ones."""

    compute_us: float
    memory_us: float
    overhead_us: float
    data_us: float

    @property
    def step_us(self) -> float:
        return self.compute_us + self.memory_us + self.overhead_us + self.data_us


def split_step(window: Window, on_gpu: bool) -> Split:
    """Return the split of a window's average step."""
    data = [
        (span.start_us, span.end_us)
        for span in window.spans
        if span.kind == "range"
        and span.thread == window.main_thread
        and DATA_RANGE.fullmatch(span.name)
    ]
    if on_gpu:
        transfers = [k for k in window.kernels if k.kind == "copy" and is_transfer(k.name)]
        compute = [k for k in window.kernels if k.kind == "kernel" and is_compute_kernel(k.name)]
        claimed = {id(k) for k in [*transfers, *compute]}
        memory = [k for k in window.kernels if id(k) not in claimed]
        order = [_when(compute), _when(memory), [*_when(transfers), *data]]
        compute_us, memory_us, data_us = claim(order, window.start_us, window.end_us)
    else:
        ops = [span for span in window.ops() if span.thread == window.main_thread]
        compute_ops = [(s.start_us, s.end_us) for s in ops if is_compute_op(s.name)]
        memory_ops = [(s.start_us, s.end_us) for s in ops if is_memory_op(s)]
        order = [data, compute_ops, memory_ops]
        data_us, compute_us, memory_us = claim(order, window.start_us, window.end_us)
    overhead_us = window.duration_us - compute_us - memory_us - data_us
    each = window.steps
    return Split(compute_us / each, memory_us / each, overhead_us / each, data_us / each)


def _when(kernels: Sequence[Kernel]) -> list[Interval]:
    return [(kernel.start_us, kernel.end_us) for kernel in kernels]


def is_memory_op(span: Span) -> bool:
    """Return whether a CPU call is an ATen operator whose time is memory traffic, not dispatch."""
    return (
        is_work(span.name) and not is_compute_op(span.name) and touched_bytes(span) > DISPATCH_BYTES
    )


def touched_bytes(span: Span) -> int:
    """Return the bytes of the tensors that a call received and allocated; unknown counts as
    large."""
    if span.detail is None or not span.detail.has_shapes:
        return DISPATCH_BYTES + 1
    given = sum(use.bytes for use in span.detail.inputs)
    made = sum(a.bytes for op in span.detail.walk() for a in op.allocations if a.bytes > 0)
    return given + made


def claim(order: Sequence[Sequence[Interval]], start: float, end: float) -> list[float]:
    """Return how long each class of intervals owns [start, end).

    An instant belongs to the first class in ``order`` that covers it.
    """
    owned = []
    taken: list[Interval] = []
    before = 0.0
    for intervals in order:
        clipped = [(max(a, start), min(b, end)) for a, b in intervals if b > start and a < end]
        taken = union([*taken, *clipped])
        now = sum(b - a for a, b in taken)
        owned.append(now - before)
        before = now
    return owned


def union(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the same instants as disjoint intervals in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged
