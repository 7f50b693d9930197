"""The calls of a profile as the rules of the findings see them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch

from fuselab.device.ceiling import Ceilings, measured_ceilings
from fuselab.inspect.chains import Call, Chain, find_chains, primitive_calls
from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.kineto import Details, Kernel, Span, Window
from fuselab.inspect.profile_tables import device_us
from fuselab.inspect.step_split import Split, is_memory_op, touched_bytes
from fuselab.inspect.user_code import SourceLine, plain
from fuselab.inspect.work_kinds import (
    DISPATCH_BYTES,
    RETURNS_ITS_INPUT,
    is_compute_op,
    is_work,
)


class Search:
    """The recorded calls of a profile, with what the rules ask of them."""

    def __init__(
        self, windows: Sequence[Window], details: Details, split: Split, on_gpu: bool
    ) -> None:
        self.windows, self.details, self.split, self.on_gpu = windows, details, split, on_gpu
        self.steps = sum(window.steps for window in windows)
        self.spans = [span for window in windows for span in window.ops()]

    @cached_property
    def calls(self) -> list[Call]:
        """The operators of the watched step that touch elements."""
        return primitive_calls(self.details.ops)

    @cached_property
    def chains(self) -> list[Chain]:
        """The chains of the watched step that one kernel could compute."""
        return find_chains(self.details.ops)

    @cached_property
    def cost(self) -> dict[int, float]:
        """Microseconds per step of each call of the watched step, by ``id`` of its detail."""
        cost: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.detail is not None:
                cost[id(span.detail)] += inclusive_us(span, self.on_gpu) / self.steps
        return cost

    @cached_property
    def ceilings(self) -> Ceilings | None:
        """The measured rates of the GPU; None if the profile is of no GPU that is here."""
        if not self.on_gpu or not torch.cuda.is_available():
            return None
        return measured_ceilings(torch.device("cuda", torch.cuda.current_device()))

    @property
    def multiprocessors(self) -> int:
        """The number of multiprocessors of the GPU; an A100's if none is here."""
        if torch.cuda.is_available():
            return int(torch.cuda.get_device_properties(0).multi_processor_count)
        return 108

    def finding(
        self,
        kind: str,
        title: str,
        advice: str,
        line: SourceLine | None,
        saved_us: float,
        calls: float,
        **more: Any,
    ) -> Finding:
        return Finding(
            kind=kind,
            title=title,
            advice=advice,
            line=plain(line) if line else None,
            file=line.file if line else None,
            line_number=line.line if line else None,
            source=line.text if line else "",
            saved_us=saved_us,
            share=saved_us / self.split.step_us,
            calls=calls,
            **more,
        )

    def by_line(self, spans: Iterable[Span]) -> Iterator[tuple[SourceLine | None, list[Span]]]:
        groups: dict[SourceLine | None, list[Span]] = defaultdict(list)
        for span in spans:
            groups[span.detail.line if span.detail else None].append(span)
        yield from groups.items()

    def in_model(self, span: Span) -> bool:
        detail = span.detail
        return (
            detail is not None
            and not detail.backward
            and (detail.module is not None or "forward" in detail.ranges)
        )

    def in_own_code(self, span: Span) -> bool:
        """Return whether a call of the forward is the user's, and not a library module's."""
        return self.in_model(span) and span.detail is not None and not span.detail.in_library

    def is_small(self, span: Span) -> bool:
        if self.on_gpu:
            return device_us(span) < span.duration_us
        return touched_bytes(span) <= DISPATCH_BYTES or not (
            is_memory_op(span) or is_compute_op(span.name)
        )


def inclusive_us(span: Span, on_gpu: bool) -> float:
    return device_us(span) if on_gpu else span.duration_us


def outermost(span: Span) -> Span:
    """Return the whole call on the user's line that ``span`` is part of."""
    while span.parent is not None and span.parent.name.startswith("aten::"):
        span = span.parent
    return span


def outermost_work(span: Span) -> Span:
    """Return the outermost operator around ``span`` that touches elements, which views do not."""
    found = span
    for above in span.ancestors():
        if above.kind == "op" and is_work(above.name):
            found = above
    return found


def does_work(span: Span) -> bool:
    """Return whether a call touches elements; a dropout that returns its input does not."""
    if span.name in RETURNS_ITS_INPUT:
        return has_work_below(span)
    return is_work(span.name)


def has_work_below(span: Span) -> bool:
    return any(below is not span and is_work(below.name) for below in span.walk())


def launched(span: Span) -> list[Kernel]:
    """Return the kernels that this call launched itself."""
    return [
        *span.kernels,
        *(k for child in span.children if child.kind == "runtime" for k in child.kernels),
    ]


def launcher(kernel: Kernel) -> str:
    """Return the operator that launched a kernel, with its line."""
    span = kernel.span
    while span is not None and span.kind != "op":
        span = span.parent
    if span is None:
        return plain(kernel.name, 60)
    outer = outermost(span)
    where = f" ({outer.detail.line})" if outer.detail and outer.detail.line else ""
    return f"{outer.name}{where}"


def given_bytes(span: Span) -> int:
    return sum(use.bytes for use in span.detail.inputs) if span.detail else 0


def made_bytes(span: Span) -> int:
    """Return the bytes of the largest tensor that the call allocated."""
    if span.detail is None:
        return 0
    return max((a.bytes for op in span.detail.walk() for a in op.allocations), default=0)


def made(span: Span) -> set[tuple[int, int]]:
    if span.detail is None:
        return set()
    return {a.storage for op in span.detail.walk() for a in op.allocations if a.bytes > 0}
