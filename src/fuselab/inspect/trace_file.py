"""A trace file made elsewhere, read as a profile: what torch.profiler or Kineto exported.

The file has one JSON object with ``traceEvents``, or that list alone, and may be compressed by
gzip. Steps are its ``ProfilerStep#`` ranges; without them the whole file is one step. Shapes,
stacks and memory are there if the recording asked for them (``record_shapes``, ``with_stack``,
``profile_memory``). A stack has the first line of each function, not the line that ran.
"""

from __future__ import annotations

import functools
import gzip
import json
import re
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fuselab.errors import MissingTargetError, TargetError
from fuselab.inspect.kineto import (
    STEP,
    Allocation,
    Detail,
    Details,
    RangeUse,
    Span,
    TensorUse,
    Window,
    lines_of_backward,
    read_window,
)
from fuselab.inspect.profile import Profile, summarize_attached
from fuselab.inspect.user_code import SourceLine, is_user_file, plain

SUFFIXES = (".json", ".json.gz")

_FRAME = re.compile(r"^(?P<file>.+\.py)\((?P<line>\d+)\): ")
_INSTALLED = re.compile(r"(^|/)(site-packages|dist-packages|lib/python3[^/]*)/|^<")
# Kineto leaves out the folder of sys.path that a file lies in: torch/nn/modules/conv.py.
_FOREIGN_TOP = {"torch", "torchvision", "torchaudio", "triton", "transformers", "lightning"}
_MODULE = "nn.Module: "
_BACKWARD = "autograd::engine::evaluate_function"
_DTYPES = {
    "float": torch.float32,
    "double": torch.float64,
    "c10::Half": torch.float16,
    "c10::BFloat16": torch.bfloat16,
    "long int": torch.int64,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "bool": torch.bool,
    "signed char": torch.int8,
    "unsigned char": torch.uint8,
}


def profile_trace(path: str, *, within: str | None = None) -> Profile:
    """Read a trace file and return its profile.

    ``within`` restricts tables and findings to one named range. Raises TargetError if it is no
    trace, MissingTargetError if there is no such file, ArgumentError if there is no such range.
    """
    trace = _read(path)
    steps = [e for e in trace["traceEvents"] if _is_host(e) and e["name"].startswith(STEP)]
    if not steps:
        trace["traceEvents"].append(_one_step(trace["traceEvents"], path))
    try:
        window = read_window(trace, max(len(steps), 1))
        details = _details(window, trace["traceEvents"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TargetError(
            f"{plain(path)} is no trace that torch.profiler exports "
            f"({type(error).__name__}: {plain(error)}); export one with "
            "prof.export_chrome_trace(FILE)."
        ) from error
    known = sum(span.detail is not None and span.detail.line is not None for span in window.ops())
    total = sum(1 for _ in window.ops())
    return summarize_attached(
        plain(Path(path).name),
        [window],
        details,
        [json.dumps(trace)],
        within,
        known / total if total else 0.0,
    )


def _read(path: str) -> dict[str, Any]:
    """Return a trace with the list ``traceEvents`` of objects that have a name."""
    if not Path(path).is_file():
        raise MissingTargetError(f"no file '{plain(path)}'; check the path.")
    try:
        data = Path(path).read_bytes()
        found = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (OSError, EOFError, ValueError) as error:
        raise TargetError(f"cannot read {plain(path)} as JSON: {plain(error)}.") from error
    if isinstance(found, Mapping) and "verb" in found:
        raise TargetError(
            f"{plain(path)} is a result of 'fuselab {plain(found['verb'])} --json'; give the file "
            "that --trace wrote, or compare with this one by --against."
        )
    events = found.get("traceEvents") if isinstance(found, Mapping) else found
    if not isinstance(events, list):
        raise TargetError(
            f"{plain(path)} has no list 'traceEvents'; a trace is what "
            "prof.export_chrome_trace(FILE) writes."
        )
    events = [e for e in events if isinstance(e, dict) and isinstance(e.get("name"), str)]
    if not any(_is_host(e) for e in events):
        raise TargetError(
            f"{plain(path)} has no operators or named ranges of the host; record it with "
            "ProfilerActivity.CPU."
        )
    return {"traceEvents": events}


def _is_host(event: Mapping[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in ("cpu_op", "user_annotation")


def _one_step(events: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    """Return a step around everything that the host did, on the thread that did most."""
    host = [e for e in events if _is_host(e)]
    try:
        start = min(float(e["ts"]) for e in host)
        end = max(float(e["ts"]) + float(e["dur"]) for e in host)
        threads = [e["tid"] for e in host]
    except (KeyError, TypeError, ValueError) as error:
        raise TargetError(
            f"{plain(path)} has an event without times ({plain(error)}); it is no whole trace."
        ) from error
    return {
        "ph": "X",
        "cat": "user_annotation",
        "name": f"{STEP}0",
        "tid": max(set(threads), key=threads.count),
        "ts": start,
        "dur": end - start + 1e-3,
        "args": {},
    }


# --- what ran where ------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Frame:
    start_us: float
    end_us: float
    line: SourceLine | None  # of the user's code
    module: str | None


class _Stacks:
    """The Python frames of each thread, for the place in which a moment lies."""

    def __init__(self, events: Sequence[Mapping[str, Any]]) -> None:
        self.frames: dict[int, list[_Frame]] = {}
        for event in events:
            if event.get("cat") == "python_function" and event.get("ph") == "X":
                frame = _frame(event)
                if frame is not None:
                    self.frames.setdefault(int(event["tid"]), []).append(frame)
        self.starts = {}
        for thread, frames in self.frames.items():
            frames.sort(key=lambda frame: (frame.start_us, -frame.end_us))
            self.starts[thread] = [frame.start_us for frame in frames]
        self.around = {thread: _parents(frames) for thread, frames in self.frames.items()}

    def place(self, thread: int, moment_us: float) -> tuple[SourceLine | None, str | None]:
        """Return the innermost line of the user's and the path of modules around a moment."""
        frames = self.frames.get(thread, [])
        position = bisect_right(self.starts.get(thread, []), moment_us) - 1
        line = None
        modules: list[str] = []
        while position >= 0:
            frame = frames[position]
            if frame.end_us > moment_us:
                line = line or frame.line
                if frame.module is not None:
                    modules.append(frame.module)
            position = self.around[thread][position]
        return line, ".".join(reversed(modules)) or None


def _frame(event: Mapping[str, Any]) -> _Frame | None:
    name = event["name"]
    start = float(event["ts"])
    end = start + float(event["dur"])
    if name.startswith(_MODULE):
        return _Frame(start, end, None, name.removeprefix(_MODULE))
    match = _FRAME.match(name)
    if match and _is_users(match["file"]):
        return _Frame(start, end, SourceLine(match["file"], int(match["line"])), None)
    return None


@functools.cache
def _is_users(file: str) -> bool:
    """Return whether a file of the machine that recorded was the user's."""
    top, slash, _ = file.partition("/")
    if slash and top and (top in _FOREIGN_TOP or top in sys.stdlib_module_names):
        return False
    if not slash and file.removesuffix(".py") in sys.stdlib_module_names:
        return False
    return is_user_file(file) and not _INSTALLED.search(file)


def _parents(frames: Sequence[_Frame]) -> list[int]:
    """Return for each frame the position of the one around it, or -1."""
    around = []
    stack: list[int] = []
    for position, frame in enumerate(frames):
        while stack and frames[stack[-1]].end_us <= frame.start_us:
            stack.pop()
        around.append(stack[-1] if stack else -1)
        stack.append(position)
    return around


# --- the details of each call --------------------------------------------------------------------


def _details(window: Window, events: Sequence[Mapping[str, Any]]) -> Details:
    """Give every operator of the window its detail; return those of the first step."""
    stacks = _Stacks(events)
    made: list[Detail] = []
    has_shapes = any("Input Dims" in span.arguments for span in window.ops())
    for span in window.ops():
        above = next((a for a in span.ancestors() if a.kind == "op"), None)
        parent = above.detail if above is not None else None
        line, module = stacks.place(span.thread, span.start_us)
        detail = Detail(
            name=span.name,
            line=line or (parent.line if parent else None),
            module=module or (parent.module if parent else None),
            ranges=tuple(a.name for a in span.ancestors() if a.kind == "range"),
            backward=_is_backward(span),
            thread=span.thread,
            sequence=int(span.arguments.get("Sequence number", -1)),
            inputs=tuple(_uses(span, len(made))),
            allocations=[],
            parent=parent,
            has_shapes=has_shapes,
        )
        if parent is not None:
            parent.children.append(detail)
        span.detail = detail
        made.append(detail)
    lines_of_backward(made)
    end = window.start_us + window.duration_us / window.steps
    first = [span for span in window.ops() if span.start_us < end]
    allocations = _allocations(first, events, window.start_us, end)
    return Details(
        [span.detail for span in first if span.detail is not None],
        allocations,
        [
            RangeUse(s.name, s.start_us, s.end_us)
            for s in window.spans
            if s.kind == "range" and s.start_us < end
        ],
    )


def _is_backward(span: Span) -> bool:
    return span.name.startswith(_BACKWARD) or any(
        above.name.startswith(_BACKWARD) for above in span.ancestors()
    )


def _uses(span: Span, number: int) -> Iterator[TensorUse]:
    """Yield the tensors a call was given. The file does not say which share memory: each has a
    storage of its own."""
    shapes = span.arguments.get("Input Dims", [])
    types = span.arguments.get("Input type", [])
    strides = span.arguments.get("Input Strides", [])
    for place, (sizes, kind) in enumerate(zip(shapes, types, strict=False)):
        if kind not in _DTYPES or any(not isinstance(size, int) for size in sizes):
            continue
        given = strides[place] if place < len(strides) else []
        yield TensorUse(
            storage=(-1 - number, place),
            sizes=tuple(sizes),
            strides=tuple(given) if len(given) == len(sizes) else _contiguous(sizes),
            dtype=_DTYPES[kind],
        )


def _contiguous(sizes: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


def _allocations(
    spans: Sequence[Span], events: Sequence[Mapping[str, Any]], start: float, end: float
) -> list[Allocation]:
    """Return the changes of memory in [start, end), each with the innermost operator around it."""
    by_thread: dict[int, list[Span]] = {}
    for each in spans:
        by_thread.setdefault(each.thread, []).append(each)
    starts = {thread: [s.start_us for s in mine] for thread, mine in by_thread.items()}
    found = []
    for event in events:
        if event["name"] != "[memory]" or not start <= float(event["ts"]) < end:
            continue
        arguments = event.get("args", {})
        thread, moment = int(event["tid"]), float(event["ts"])
        position = bisect_right(starts.get(thread, []), moment) - 1
        span: Span | None = by_thread[thread][position] if position >= 0 else None
        while span is not None and span.end_us < moment:
            span = span.parent
        while span is not None and span.kind != "op":
            span = span.parent
        change = Allocation(
            time_us=moment,
            bytes=int(arguments["Bytes"]),
            storage=(int(arguments["Addr"]), 0),
            device="cuda" if arguments.get("Device Type") == 1 else "cpu",
            total_bytes=int(arguments.get("Total Allocated", 0)),
            op=span.detail if span is not None else None,
        )
        if change.op is not None:
            change.op.allocations.append(change)
        found.append(change)
    return sorted(found, key=lambda change: change.time_us)
