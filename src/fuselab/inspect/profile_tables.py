"""The tables of a profile: by operator, kernel, module, line and range; call tree; memory.

Every figure is per step. ``share`` is the share of the step's wall time: of device time on a GPU,
of self time on a CPU. The shares of a table therefore add up to at most 1 (but ranges and the
totals of modules nest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fuselab.inspect.kineto import Detail, Details, Kernel, Span, Window, short_kernel_name
from fuselab.inspect.step_memory import Memory, memory_of
from fuselab.inspect.step_split import union
from fuselab.inspect.user_code import plain, short_names

SHAPES_KEPT = 4


@dataclass
class OperatorRow:
    name: str
    calls: float = 0.0
    self_cpu_us: float = 0.0
    cpu_us: float = 0.0
    self_device_us: float = 0.0
    device_us: float = 0.0
    share: float = 0.0
    allocated_bytes: int = 0  # with those of the operators below
    shapes: list[str] = field(default_factory=list)  # the most expensive ones first


@dataclass
class KernelRow:
    name: str
    short_name: str
    kind: str
    calls: float = 0.0
    device_us: float = 0.0
    share: float = 0.0
    grid: tuple[int, ...] | None = None
    block: tuple[int, ...] | None = None
    least_bytes: float = 0.0  # operands and results once, of the operators that launched it


@dataclass
class PlaceRow:
    """A module, a source line or a range.

    ``cpu_us`` of a range is wall time on the host; of a module or line it is its operators' self
    time. ``total_us`` of a module includes the modules inside it.
    """

    name: str
    calls: float = 0.0
    cpu_us: float = 0.0
    device_us: float = 0.0
    total_us: float = 0.0
    backward_us: float = 0.0
    share: float = 0.0
    text: str = ""


@dataclass
class LineRow(PlaceRow):
    """A source line. ``name`` is short; ``file`` is the whole path."""

    file: str = ""
    line_number: int = 0


@dataclass
class TreeNode:
    """Calls of one name below the same parent, merged; ``kernels`` are those they launched."""

    name: str
    kind: str
    calls: float = 0.0
    cpu_us: float = 0.0
    device_us: float = 0.0
    kernels: list[KernelRow] = field(default_factory=list)
    children: list[TreeNode] = field(default_factory=list)


@dataclass
class Tables:
    operators: list[OperatorRow]
    kernels: list[KernelRow]
    modules: list[PlaceRow]
    lines: list[LineRow]
    ranges: list[PlaceRow]
    tree: list[TreeNode]
    memory: Memory | None
    busy_share: float | None  # of the device; None without a GPU

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def tabulate(windows: Sequence[Window], details: Details, on_gpu: bool) -> Tables:
    """Compute all tables of the recorded windows and the watched step."""
    steps = sum(window.steps for window in windows)
    step_us = sum(window.duration_us for window in windows) / steps
    tables = Tables(
        operators=_operators(windows, on_gpu),
        kernels=_kernels(kernel for window in windows for kernel in window.kernels),
        modules=_modules(windows, on_gpu),
        lines=_lines(windows, on_gpu),
        ranges=_ranges(windows, on_gpu),
        tree=_tree([s for w in windows for s in w.spans if s.parent is None], steps),
        memory=memory_of(details, "cuda" if on_gpu else "cpu"),
        busy_share=_busy_share(windows) if on_gpu else None,
    )
    for rows in (tables.operators, tables.kernels, tables.modules, tables.lines, tables.ranges):
        for row in rows:
            _per_step(row, steps, step_us)
    return tables


def _per_step(row: Any, steps: int, step_us: float) -> None:
    """Turn sums into averages per step, and ``share``, in microseconds until here, into a share."""
    for name, value in vars(row).items():
        if isinstance(value, float):
            setattr(row, name, value / steps)
    row.share = row.share / step_us


def self_device_us(span: Span) -> float:
    """Return the device time of the kernels that a call launched itself, not through calls
    below."""
    return sum(k.duration_us for k in span.kernels) + sum(
        self_device_us(child) for child in span.children if child.kind == "runtime"
    )


def self_charged_us(span: Span, on_gpu: bool) -> float:
    """Return a call's own cost: device time on a GPU, self time on a CPU."""
    return self_device_us(span) if on_gpu else span.self_us


def device_us(span: Span) -> float:
    return sum(kernel.duration_us for below in span.walk() for kernel in below.kernels)


def _by_cost(rows: Iterable[Any]) -> list[Any]:
    return sorted(rows, key=lambda row: (-row.share, row.name))


def _operators(windows: Sequence[Window], on_gpu: bool) -> list[OperatorRow]:
    rows: dict[str, OperatorRow] = {}
    cost_of_shapes: dict[str, dict[str, float]] = {}
    for window in windows:
        for span in window.ops():
            row = rows.setdefault(span.name, OperatorRow(plain(span.name)))
            row.self_cpu_us += span.self_us
            row.self_device_us += self_device_us(span)
            row.share += self_charged_us(span, on_gpu)
            # do not count an operator inside one of the same name again
            if any(above.name == span.name for above in span.ancestors()):
                continue
            row.calls += 1
            row.cpu_us += span.duration_us
            row.device_us += device_us(span)
            row.allocated_bytes += _allocated_bytes(span.detail)
            if shapes := _shapes(span.detail):
                costs = cost_of_shapes.setdefault(span.name, {})
                cost = device_us(span) if on_gpu else span.duration_us
                costs[shapes] = costs.get(shapes, 0.0) + cost
    for name, row in rows.items():
        row.allocated_bytes //= sum(window.steps for window in windows)
        costs = cost_of_shapes.get(name, {})
        row.shapes = sorted(costs, key=lambda shapes: -costs[shapes])[:SHAPES_KEPT]
    return _by_cost(rows.values())


def _shapes(detail: Detail | None) -> str:
    """Return the sizes of a call's tensors as text; nothing where they are not known."""
    if detail is None:
        return ""
    return " ".join("x".join(map(str, use.sizes)) or "()" for use in detail.inputs)


def _allocated_bytes(detail: Detail | None) -> int:
    """Return the bytes that a call allocated, itself and through the calls below."""
    if detail is None:
        return 0
    return sum(a.bytes for op in detail.walk() for a in op.allocations if a.bytes > 0)


def _kernels(kernels: Iterable[Kernel]) -> list[KernelRow]:
    rows: dict[tuple[Any, ...], KernelRow] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.grid, kernel.block)
        row = rows.setdefault(key, _kernel_row(kernel))
        row.calls += 1
        row.device_us += kernel.duration_us
        row.share += kernel.duration_us
        row.least_bytes += _operand_bytes(kernel)
    return _by_cost(rows.values())


def _operand_bytes(kernel: Kernel) -> int:
    """Return the bytes of the tensors that the launching operator was given and made, each once."""
    span = kernel.span
    while span is not None and span.kind != "op":
        span = span.parent
    if span is None or span.detail is None:
        return 0
    return sum(use.bytes for use in span.detail.inputs) + _allocated_bytes(span.detail)


def _kernel_row(kernel: Kernel) -> KernelRow:
    short = plain(short_kernel_name(kernel.name))
    return KernelRow(
        plain(kernel.name, 400), short, kernel.kind, grid=kernel.grid, block=kernel.block
    )


def _places(
    windows: Sequence[Window], on_gpu: bool, names_of: Callable[[Span], Sequence[str]]
) -> dict[str, PlaceRow]:
    """Sum operator calls by the names from ``names_of``: the first name owns the call, the others
    contain it."""
    rows: dict[str, PlaceRow] = {}
    for window in windows:
        for span in window.ops():
            for position, name in enumerate(names_of(span)):
                row = rows.setdefault(name, PlaceRow(name))
                charged = self_charged_us(span, on_gpu)
                row.total_us += charged
                if position == 0:
                    row.calls += 1
                    row.cpu_us += span.self_us
                    row.device_us += self_device_us(span)
                    row.share += charged
                    if span.detail is not None and span.detail.backward:
                        row.backward_us += charged
    return rows


def _modules(windows: Sequence[Window], on_gpu: bool) -> list[PlaceRow]:
    def names(span: Span) -> list[str]:
        if span.detail is None or span.detail.module is None:
            return []
        parts = span.detail.module.split(".")
        return [".".join(parts[:count]) for count in range(len(parts), 0, -1)]

    return _by_cost(_places(windows, on_gpu, names).values())


def _lines(windows: Sequence[Window], on_gpu: bool) -> list[LineRow]:
    known = short_names(
        span.detail.line
        for window in windows
        for span in window.ops()
        if span.detail is not None and span.detail.line is not None
    )

    def names(span: Span) -> list[str]:
        if span.detail is None or span.detail.line is None:
            return []
        return [known[span.detail.line]]

    rows = _places(windows, on_gpu, names)
    return _by_cost(
        LineRow(**{**vars(rows[name]), "text": line.text}, file=line.file, line_number=line.line)
        for line, name in known.items()
    )


def _ranges(windows: Sequence[Window], on_gpu: bool) -> list[PlaceRow]:
    """Return the named ranges, by wall time on the host, with the device time launched in each."""
    rows: dict[str, PlaceRow] = {}
    for window in windows:
        launches = [(_launch_us(kernel), kernel.duration_us) for kernel in window.kernels]
        for span in window.spans:
            if span.kind != "range":
                continue
            row = rows.setdefault(span.name, PlaceRow(plain(span.name)))
            inside = sum(us for at, us in launches if span.start_us <= at < span.end_us)
            row.calls += 1
            row.cpu_us += span.duration_us
            row.device_us += inside
            row.share += inside if on_gpu else span.duration_us
    return _by_cost(rows.values())


def _launch_us(kernel: Kernel) -> float:
    return kernel.span.start_us if kernel.span is not None else kernel.start_us


def _tree(spans: Sequence[Span], steps: int) -> list[TreeNode]:
    """Merge siblings of one name, most expensive first."""
    groups: dict[tuple[str, str], list[Span]] = {}
    for span in spans:
        groups.setdefault((span.name, span.kind), []).append(span)
    nodes = []
    for (name, kind), members in groups.items():
        kernels = _kernels(kernel for span in members for kernel in span.kernels)
        for row in kernels:
            row.calls, row.device_us, row.share = row.calls / steps, row.device_us / steps, 0.0
            row.least_bytes /= steps
        nodes.append(
            TreeNode(
                name=plain(name),
                kind=kind,
                calls=len(members) / steps,
                cpu_us=sum(span.duration_us for span in members) / steps,
                device_us=sum(device_us(span) for span in members) / steps,
                kernels=kernels,
                children=_tree([child for span in members for child in span.children], steps),
            )
        )
    return sorted(nodes, key=lambda node: (-node.cpu_us, node.name))


def _busy_share(windows: Sequence[Window]) -> float:
    """Return the share of the time in which the device ran anything."""
    busy = sum(
        end - start
        for window in windows
        for start, end in union([(k.start_us, k.end_us) for k in window.kernels])
    )
    return busy / sum(window.duration_us for window in windows)
