"""The memory of the watched step: its height over time, and which lines and modules hold it.

An allocation belongs to the source line and module of the operator that made it, until it is freed.
A backward operator belongs to the forward line whose gradient it computes; its allocations are
named ``model.py:12 backward``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fuselab.inspect.kineto import Allocation, Detail, Details, Storage
from fuselab.inspect.user_code import SourceLine, plain, short_names

TIMELINE_POINTS = 200
LAYERS = 6  # lines shown by name in the picture; the rest are one layer
OTHER = "other"
NO_LINE = "no line of yours"


@dataclass
class HolderRow:
    """The allocations of one source line or module.

    ``calls`` counts them, ``allocated_bytes`` is their sum over the step, and ``at_peak_bytes`` is
    what was still held when the memory was highest.
    """

    name: str
    calls: int = 0
    allocated_bytes: int = 0
    at_peak_bytes: int = 0
    text: str = ""


@dataclass
class Layer:
    """The bytes that one line held at each point of the timeline."""

    name: str
    held_bytes: list[int]


@dataclass
class Memory:
    """The memory of the watched step.

    ``peak_bytes`` counts from the step's start; ``start_bytes`` was allocated before it (known on a
    GPU); ``timeline`` is a list of (microseconds, bytes above the start). ``layers`` divides the
    timeline by line, the largest first. ``ranges`` are (name, start, end) in the same microseconds.
    """

    device: str
    peak_bytes: int
    start_bytes: int | None
    allocated_bytes: int
    timeline: list[tuple[float, int]]
    layers: list[Layer]
    lines: list[HolderRow]
    modules: list[HolderRow]
    ranges: list[tuple[str, float, float]]


def memory_of(details: Details, device: str) -> Memory | None:
    """Return the memory of the watched step on ``device``; None if nothing was allocated there."""
    changes = [a for a in details.allocations if a.device == device]
    if not changes:
        return None
    start = min([changes[0].time_us, *(use.start_us for use in details.ranges)])
    end = max([changes[-1].time_us, *(use.end_us for use in details.ranges)])
    level = peak = peak_at = 0
    timeline: list[tuple[float, int]] = [(0.0, 0)]
    for position, change in enumerate(changes, 1):
        level += change.bytes
        if level > peak:
            peak, peak_at = level, position
        timeline.append((change.time_us - start, level))
    timeline.append((end - start, level))
    kept = _highest_of_each_stretch(timeline)
    lines = _names_of_lines(changes)
    return Memory(
        device=device,
        peak_bytes=peak,
        start_bytes=changes[0].total_bytes - changes[0].bytes if device == "cuda" else None,
        allocated_bytes=sum(change.bytes for change in changes if change.bytes > 0),
        timeline=[timeline[position] for position in kept],
        layers=_layers(changes, kept, lambda op: _line_name(op, lines)),
        lines=_holders(changes, peak_at, lambda op: _line_name(op, lines), _texts(lines)),
        modules=_holders(changes, peak_at, _module_name, {}),
        ranges=[
            (plain(use.name), use.start_us - start, use.end_us - start) for use in details.ranges
        ],
    )


def _highest_of_each_stretch(timeline: Sequence[tuple[float, int]]) -> list[int]:
    """Return at most TIMELINE_POINTS positions, the highest of every stretch, so that the peak
    remains."""
    stretch = -(-len(timeline) // TIMELINE_POINTS)
    return [
        max(range(first, min(first + stretch, len(timeline))), key=lambda i: timeline[i][1])
        for first in range(0, len(timeline), stretch)
    ]


def _names_of_lines(changes: Sequence[Allocation]) -> Mapping[SourceLine, str]:
    return short_names(a.op.line for a in changes if a.op is not None and a.op.line is not None)


def _line_name(op: Detail | None, names: Mapping[SourceLine, str]) -> str:
    if op is None or op.line is None:
        return NO_LINE
    return f"{names[op.line]} backward" if op.backward else names[op.line]


def _texts(names: Mapping[SourceLine, str]) -> dict[str, str]:
    texts = {name: line.text for line, name in names.items()}
    return {**texts, **{f"{name} backward": text for name, text in texts.items()}}


def _module_name(op: Detail | None) -> str:
    if op is None or op.module is None:
        return "no module"
    return plain(op.module)


def _holders(
    changes: Sequence[Allocation],
    peak_at: int,
    name_of: Callable[[Detail | None], str],
    texts: Mapping[str, str],
) -> list[HolderRow]:
    rows: dict[str, HolderRow] = {}
    live: dict[Storage, tuple[str, int]] = {}
    for position, change in enumerate(changes, 1):
        if change.bytes > 0:
            name = name_of(change.op)
            row = rows.setdefault(name, HolderRow(name, text=texts.get(name, "")))
            row.calls += 1
            row.allocated_bytes += change.bytes
            live[change.storage] = name, change.bytes
        else:
            live.pop(change.storage, None)
        if position == peak_at:
            for name, size in live.values():
                rows[name].at_peak_bytes += size
    return sorted(
        rows.values(), key=lambda row: (-row.at_peak_bytes, -row.allocated_bytes, row.name)
    )


def _layers(
    changes: Sequence[Allocation],
    kept: Sequence[int],
    name_of: Callable[[Detail | None], str],
) -> list[Layer]:
    """Return what each line held after as many changes as ``kept`` says, the largest holder
    first."""
    wanted = set(kept)
    held: dict[str, int] = defaultdict(int)
    owner: dict[Storage, str] = {}
    points: list[dict[str, int]] = [{}] if 0 in wanted else []
    for position, change in enumerate(changes, 1):
        if change.bytes > 0:
            owner[change.storage] = name_of(change.op)
            held[owner[change.storage]] += change.bytes
        elif change.storage in owner:
            held[owner.pop(change.storage)] += change.bytes
        if position in wanted:
            points.append(dict(held))
    if len(changes) + 1 in wanted:  # the timeline's last point, at the end of the last range
        points.append(dict(held))
    most = {name: max(point.get(name, 0) for point in points) for name in held}
    order = sorted(most, key=lambda name: (-most[name], name))
    named = [name for name in order if name != NO_LINE][:LAYERS]
    layers = [Layer(name, [point.get(name, 0) for point in points]) for name in named]
    rest = [sum(size for name, size in point.items() if name not in named) for point in points]
    return [*layers, Layer(OTHER, rest)] if any(rest) else layers
