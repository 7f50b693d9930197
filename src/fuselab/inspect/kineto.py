"""The records of torch.profiler as plain objects; only this file knows its formats.

There are two formats, for two passes. ``read_window`` reads the Chrome trace of undisturbed steps:
when each operator, range and kernel ran. ``read_details`` reads the profiler's event tree of one
step that was watched closely (``line_tracer``): which source line and module called each operator,
on which tensors, and what was allocated. Times are in microseconds, sizes in bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fuselab.inspect.line_tracer import MARKER, Markers
from fuselab.inspect.user_code import SourceLine

STEP = "ProfilerStep#"  # torch's own name for a step, which TensorBoard's plugin looks for

_DEVICE_CATEGORIES = {"kernel": "kernel", "gpu_memcpy": "copy", "gpu_memset": "fill"}
_HOST_CATEGORIES = {
    "cpu_op": "op",
    "user_annotation": "range",
    "cuda_runtime": "runtime",
    "cuda_driver": "runtime",
}


@dataclass(eq=False)
class Kernel:
    """One piece of work on the GPU: a kernel, a copy or a fill."""

    name: str
    kind: str  # kernel, copy, fill
    start_us: float
    duration_us: float
    grid: tuple[int, ...] | None
    block: tuple[int, ...] | None
    bytes: int | None
    span: Span | None = None

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(eq=False)
class Span:
    """One call on the host: an operator, a named range, or a call into CUDA's runtime."""

    name: str
    kind: str  # op, range, runtime
    thread: int
    start_us: float
    duration_us: float
    parent: Span | None = None
    children: list[Span] = field(default_factory=list)
    kernels: list[Kernel] = field(default_factory=list)  # launched by this call itself
    detail: Detail | None = None
    arguments: dict[str, Any] = field(default_factory=dict, repr=False)  # as the trace has them

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us

    @property
    def self_us(self) -> float:
        """Host time not spent in operators below; a runtime call is part of its operator."""
        return self.duration_us - sum(child.duration_us for child in self._below())

    def _below(self) -> Iterator[Span]:
        for child in self.children:
            if child.kind == "op":
                yield child
            else:
                yield from child._below()

    def walk(self) -> Iterator[Span]:
        yield self
        for child in self.children:
            yield from child.walk()

    def ancestors(self) -> Iterator[Span]:
        span = self.parent
        while span is not None:
            yield span
            span = span.parent


@dataclass
class Window:
    """Consecutive undisturbed steps.

    A window contains everything that ran between the first step's start and the last one's end, and
    the device work that these steps launched.
    """

    start_us: float
    end_us: float
    steps: int
    main_thread: int
    spans: list[Span]  # every op, range and runtime call of every thread, parents first
    kernels: list[Kernel]

    @property
    def duration_us(self) -> float:
        return self.end_us - self.start_us

    def ops(self) -> Iterator[Span]:
        return (span for span in self.spans if span.kind == "op")


Storage = tuple[int, int]  # an allocation: its address, and a number where addresses repeat


@dataclass(frozen=True)
class TensorUse:
    """One tensor argument. Equal ``storage`` means the same allocation."""

    storage: Storage
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        count = 1
        for size in self.sizes:
            count *= size
        return count

    @property
    def bytes(self) -> int:
        """The number of distinct bytes it touches; an expanded dimension counts once."""
        count = 1
        for size, stride in zip(self.sizes, self.strides, strict=False):
            count *= size if stride else min(size, 1)
        return count * self.dtype.itemsize


@dataclass(frozen=True)
class Allocation:
    """A change of allocated memory; negative when freed."""

    time_us: float
    bytes: int
    storage: Storage
    device: str
    total_bytes: int
    op: Detail | None = None  # the innermost operator that was running


@dataclass(frozen=True)
class RangeUse:
    """One named range of the watched step."""

    name: str
    start_us: float
    end_us: float


@dataclass(eq=False)
class Detail:
    """One operator call in the watched step."""

    name: str
    line: SourceLine | None
    module: str | None
    ranges: tuple[str, ...]
    backward: bool
    thread: int
    sequence: int
    inputs: tuple[TensorUse, ...]
    allocations: list[Allocation]  # by this call itself, not by the calls below
    parent: Detail | None
    children: list[Detail] = field(default_factory=list)
    has_shapes: bool = True  # False if the recording left them out
    in_library: bool = False  # the module's forward is a library's, as nn.GRU's

    def walk(self) -> Iterator[Detail]:
        yield self
        for child in self.children:
            yield from child.walk()


@dataclass
class Details:
    """The watched step: its operator calls in order, parents first, and its memory."""

    ops: list[Detail]
    allocations: list[Allocation]
    ranges: list[RangeUse] = field(default_factory=list)


def part_within(window: Window, name: str) -> Window:
    """Return the part of a window that ran inside ranges called ``name``.

    An operator of another thread, as autograd's, belongs to the range in which it began. A kernel
    belongs to the operator that launched it. Start, end and steps stay those of the window, so that
    shares remain shares of the whole step.
    """
    inside = [span for span in window.spans if span.kind == "range" and span.name == name]
    when = [(span.start_us, span.end_us) for span in inside]
    kept = [
        span for span in window.spans if any(start <= span.start_us < end for start, end in when)
    ]
    members = set(map(id, kept))
    kernels = [k for k in window.kernels if k.span is not None and id(k.span) in members]
    return replace(window, spans=kept, kernels=kernels)


# --- the Chrome trace ----------------------------------------------------------------------------


def read_window(trace: dict[str, Any], whole_steps: int) -> Window:
    """Read the first ``whole_steps`` steps of a Chrome trace that torch.profiler exported."""
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X"]
    steps = [e for e in events if e.get("cat") == "user_annotation" and _is_step(e["name"])]
    steps = sorted(steps, key=lambda e: float(e["ts"]))[:whole_steps]
    start = float(steps[0]["ts"])
    end = max(float(e["ts"]) + float(e["dur"]) for e in steps)
    host = [e for e in events if e.get("cat") in _HOST_CATEGORIES and not _is_step(e["name"])]
    host = [e for e in host if start <= float(e["ts"]) < end]
    launched_by: dict[int, Span] = {}
    external: dict[int, Span] = {}
    spans: list[Span] = []
    # so that threads come in the order in which they began to work
    host.sort(key=lambda e: float(e["ts"]))
    for thread in dict.fromkeys(_thread(e) for e in host):
        spans += _nest([e for e in host if _thread(e) == thread], launched_by, external)
    recorded = (
        _kernel(event, launched_by, external)
        for event in events
        if event.get("cat") in _DEVICE_CATEGORIES
    )
    # The host runs ahead, so a step's kernel may start after the step's end.
    kernels = [k for k in recorded if k.span is not None or start <= k.start_us < end]
    kernels.sort(key=lambda kernel: kernel.start_us)
    end = max([end, *(kernel.end_us for kernel in kernels)])
    return Window(start, end, len(steps), _thread(steps[0]), spans, kernels)


def _is_step(name: str) -> bool:
    return name.startswith(STEP)


def _thread(event: dict[str, Any]) -> int:
    return int(event["tid"])


def _nest(
    events: list[dict[str, Any]], launched_by: dict[int, Span], external: dict[int, Span]
) -> list[Span]:
    """Link the spans of one thread to the span around them; times nest, so a stack is enough."""
    spans: list[Span] = []
    stack: list[Span] = []
    for event in sorted(events, key=lambda e: (float(e["ts"]), -float(e["dur"]))):
        arguments = event.get("args", {})
        span = Span(
            name=event["name"],
            kind=_HOST_CATEGORIES[event["cat"]],
            thread=_thread(event),
            start_us=float(event["ts"]),
            duration_us=float(event["dur"]),
            arguments=arguments,
        )
        while stack and stack[-1].end_us <= span.start_us:
            stack.pop()
        if stack:
            span.parent = stack[-1]
            stack[-1].children.append(span)
        if span.kind == "runtime":
            if "correlation" in arguments:
                launched_by[arguments["correlation"]] = span
        elif "External id" in arguments:
            external[arguments["External id"]] = span
        stack.append(span)
        spans.append(span)
    return spans


def _kernel(
    event: dict[str, Any], launched_by: dict[int, Span], external: dict[int, Span]
) -> Kernel:
    arguments = event.get("args", {})
    kernel = Kernel(
        name=event["name"],
        kind=_DEVICE_CATEGORIES[event["cat"]],
        start_us=float(event["ts"]),
        duration_us=float(event["dur"]),
        grid=tuple(arguments["grid"]) if "grid" in arguments else None,
        block=tuple(arguments["block"]) if "block" in arguments else None,
        bytes=arguments.get("bytes"),
    )
    launch = launched_by.get(arguments.get("correlation", -1))
    kernel.span = launch or external.get(arguments.get("External id", -1))
    if kernel.span is not None:
        kernel.span.kernels.append(kernel)
    return kernel


# --- the event tree ------------------------------------------------------------------------------


def read_details(profiler: torch.profiler.profile, markers: Markers) -> Details:
    """Read the operator calls of the step that ``profiler`` recorded under the line tracer."""
    roots = profiler.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    reader = _TreeReader(markers)
    roots.sort(key=lambda root: root.start_time_ns)
    for thread in dict.fromkeys(root.start_tid for root in roots):
        reader.read_thread([root for root in roots if root.start_tid == thread])
    lines_of_backward(reader.ops)
    reader.allocations.sort(key=lambda allocation: allocation.time_us)
    return Details(reader.ops, reader.allocations, reader.ranges)


class _TreeReader:
    """Walks one thread's events in order, keeping the line and module that the markers set."""

    def __init__(self, markers: Markers) -> None:
        self.markers = markers
        self.ops: list[Detail] = []
        self.allocations: list[Allocation] = []
        self.ranges: list[RangeUse] = []

    def read_thread(self, roots: list[Any]) -> None:
        self.line: SourceLine | None = None
        self.modules: list[str] = []
        for root in roots:
            self._read(root, None, (), False)

    def _read(
        self, event: Any, parent: Detail | None, ranges: tuple[str, ...], backward: bool
    ) -> None:
        kind, extra = event.typed
        kind = kind.name
        if kind == "Allocation":
            self._allocate(event, extra, parent)
            return
        here = parent
        if kind == "TorchOp":
            name = str(event.name)
            scope = extra.scope.name
            if scope == "USER_SCOPE":
                if name.startswith(MARKER):
                    self._mark(name)
                    return
                if not _is_step(name):
                    ranges = (*ranges, name)
                    when = event.start_time_ns / 1000, event.end_time_ns / 1000
                    self.ranges.append(RangeUse(name, *when))
            else:
                backward = backward or scope == "BACKWARD_FUNCTION" or name.startswith("autograd::")
                here = self._operator(event, extra, parent, ranges, backward)
        for child in event.children:
            self._read(child, here, ranges, backward)

    def _mark(self, name: str) -> None:
        what, number = name.removeprefix(MARKER).split(":")
        if what == "line":
            self.line = self.markers.lines[int(number)]
        elif what == "enter":
            self.modules.append(self.markers.modules[int(number)])
        elif self.modules:
            self.modules.pop()

    def _operator(
        self, event: Any, extra: Any, parent: Detail | None, ranges: tuple[str, ...], backward: bool
    ) -> Detail:
        detail = Detail(
            name=str(event.name),
            line=self.line,
            module=self.modules[-1] if self.modules else None,
            in_library=bool(self.modules) and self.modules[-1] in self.markers.foreign,
            ranges=ranges,
            backward=backward,
            thread=event.start_tid,
            sequence=extra.sequence_number,
            inputs=tuple(_tensors(extra.inputs)),
            allocations=[],
            parent=parent,
        )
        if parent is not None:
            parent.children.append(detail)
        self.ops.append(detail)
        return detail

    def _allocate(self, event: Any, extra: Any, parent: Detail | None) -> None:
        allocation = Allocation(
            time_us=event.start_time_ns / 1000,
            bytes=extra.alloc_size,
            storage=(int(extra.ptr), int(extra.allocation_id or 0)),
            device=extra.device.type,
            total_bytes=extra.total_allocated,
            op=parent,
        )
        self.allocations.append(allocation)
        if parent is not None:
            parent.allocations.append(allocation)


def _tensors(inputs: Any) -> Iterator[TensorUse]:
    for value in inputs:
        if isinstance(value, list):
            yield from _tensors(value)
        elif hasattr(value, "storage_data_ptr"):
            yield TensorUse(
                storage=(int(value.storage_data_ptr or 0), int(value.allocation_id or 0)),
                sizes=tuple(value.sizes),
                strides=tuple(value.strides),
                dtype=value.dtype,
            )


def lines_of_backward(ops: list[Detail]) -> None:
    """Give each operator of the backward pass the forward line whose gradient it computes.

    Autograd's node carries the sequence number of the forward operator that made it.
    """
    forward: dict[int, Detail] = {}
    for op in ops:
        if not op.backward and op.sequence >= 0:
            # the last operator with a number is the one that made the node
            forward[op.sequence] = op
    for op in ops:
        if not op.backward:
            continue
        origin = forward.get(op.sequence) if op.sequence >= 0 else None
        if origin is not None:
            op.line, op.module = origin.line, origin.module
        elif op.parent is not None and op.parent.backward:
            op.line, op.module = op.parent.line, op.parent.module


# --- one pass laid over the other ----------------------------------------------------------------


def attach_details(window: Window, details: Details) -> float:
    """Give every operator span the detail of the same call in the watched step.

    Returns the share of spans that found one. Calls are matched by thread (in the order in which
    threads began to work), by name and by how often the name was called before in its step. The
    match is exact if every step does the same.
    """
    threads = list(dict.fromkeys(op.thread for op in details.ops))
    by_key: dict[tuple[int, str, int], Detail] = {}
    counts: dict[tuple[int, str], int] = {}
    for op in details.ops:
        thread = threads.index(op.thread)
        occurrence = counts.get((thread, op.name), 0)
        counts[thread, op.name] = occurrence + 1
        by_key[thread, op.name, occurrence] = op
    matched = total = 0
    host_threads = list(dict.fromkeys(span.thread for span in window.ops()))
    seen: dict[tuple[int, str], int] = {}
    for span in window.ops():
        thread = host_threads.index(span.thread)
        key = (thread, span.name)
        occurrence = seen.get(key, 0)
        seen[key] = occurrence + 1
        per_step = counts.get(key, 0)
        total += 1
        if per_step:
            span.detail = by_key[thread, span.name, occurrence % per_step]
            matched += 1
    return matched / total if total else 1.0


def short_kernel_name(name: str) -> str:
    """Return a kernel's name without template arguments and parameters, for a table."""
    name = re.sub(r"^void ", "", name)
    flat = re.sub(r"<[^<>]*>", "", name)
    while flat != name:
        name, flat = flat, re.sub(r"<[^<>]*>", "", flat)
    name = re.sub(r"(?<=\w)\(.*\)$", "", name)
    return name.split("::")[-1] if "::" in name else name
