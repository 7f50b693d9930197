"""Findings: changes that a profile suggests, ranked by the time they would save.

Each is a pattern in the recorded calls with the user's line. ``saved_us`` estimates by how much a
step would become shorter; each rule's docstring says how. Two findings may count the same time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fuselab.ejection.covered import is_covered
from fuselab.inspect.chains import Chain, find_chains
from fuselab.inspect.kineto import Details, Kernel, Span, Window
from fuselab.inspect.profile_tables import device_us
from fuselab.inspect.step_split import Split, is_memory_op, touched_bytes
from fuselab.inspect.user_code import SourceLine, plain
from fuselab.inspect.work_kinds import (
    CREATION,
    DISPATCH_BYTES,
    HOST_SYNC,
    is_compute_op,
    is_pageable,
    is_pointwise,
    is_transfer,
    is_work,
)

SMALLEST_SHARE = 0.002  # the least share of the step for a finding to be shown
# These cost little on a CPU, where nothing runs ahead of the host, so its profile understates them.
ALWAYS = ("host sync", "tensor built in forward")
STARVING_SHARE = 0.1  # the least share of the step spent in the loader for a finding
OVERHEAD_SHARE = 0.25  # the least share of overhead for a step to be called launch-bound
REPEATED_CALLS = 8  # calls of one small operator from one line, per step
LOOKUP_NUMEL = 65536  # the least number of results for a comparison to be a look-up
LOOKUP_GROWTH = 8  # the least ratio of its result to its larger operand
BLOWN_UP = 8  # the least ratio of a pointwise result to its inputs to be called blown up
BLOWN_UP_BYTES = 1 << 20


@dataclass(frozen=True)
class Finding:
    """One thing to change. ``kind`` is one of a closed set (docs/profile.md)."""

    kind: str
    title: str
    advice: str
    line: str | None  # short, as file:line
    file: str | None
    line_number: int | None
    source: str  # the text of the line
    saved_us: float
    share: float
    calls: float
    bytes_saved: int = 0
    operators: tuple[str, ...] = ()

    def describe(self) -> dict[str, Any]:
        return asdict(self)


def find(windows: Sequence[Window], details: Details, split: Split, on_gpu: bool) -> list[Finding]:
    """Return every finding worth at least 0.2 % of the step, the largest saving first.

    On a CPU the kinds in ``ALWAYS`` are returned whatever their share, since they cost more on a
    GPU.
    """
    search = _Search(windows, details, split, on_gpu)
    found = [
        *search.host_syncs(),
        *search.tensors_built(),
        *search.copies_in_forward(),
        *search.pageable_copies(),
        *search.starving_loader(),
        *search.launch_bound(),
        *search.repeated_small_operators(),
        *search.quadratic_lookups(),
        *search.blown_up_operands(),
        *search.dense_embedding_gradients(),
        *search.chains(),
    ]
    worth = [f for f in found if f.share >= SMALLEST_SHARE or (f.kind in ALWAYS and not on_gpu)]
    return sorted(worth, key=lambda finding: (-finding.saved_us, finding.kind, finding.line or ""))


class _Search:
    def __init__(
        self, windows: Sequence[Window], details: Details, split: Split, on_gpu: bool
    ) -> None:
        self.windows, self.details, self.split, self.on_gpu = windows, details, split, on_gpu
        self.steps = sum(window.steps for window in windows)
        self.spans = [span for window in windows for span in window.ops()]

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

    # -- the host waits for the device ------------------------------------------------------------

    def host_syncs(self) -> Iterator[Finding]:
        """Find reads of device values by the host. The saving is the time inside the call, which on
        a GPU is nearly all waiting."""
        for line, spans in self.by_line(s for s in self.spans if s.name in HOST_SYNC):
            outer = [_outermost(span) for span in spans]
            saved = sum(span.duration_us for span in outer) / self.steps
            what = ", ".join(sorted({span.name for span in outer}))
            waited = self._waited_for(outer)
            yield self.finding(
                "host sync",
                f"the host reads a value back ({what})"
                + (f"; it waits for {waited}" if waited else ""),
                "keep the value on the device (torch.where, masks, counters as tensors) and "
                "read it once every many steps"
                + ("." if self.on_gpu else "; on a GPU the whole queue drains here."),
                line,
                saved,
                len(spans) / self.steps,
                operators=tuple(sorted({span.name for span in outer})),
            )

    def _waited_for(self, spans: Sequence[Span]) -> str:
        """Return the operator whose kernels ran longest while the host waited in these calls."""
        waited: dict[str, float] = defaultdict(float)
        for window in self.windows:
            for span in spans:
                for kernel in window.kernels:
                    overlap = min(kernel.end_us, span.end_us) - max(kernel.start_us, span.start_us)
                    if overlap > 0:
                        waited[_launcher(kernel)] += overlap
        return max(waited, key=lambda name: waited[name]) if waited else ""

    # -- tensors made where they need not be ------------------------------------------------------

    def tensors_built(self) -> Iterator[Finding]:
        """Find constant tensors built in every forward.

        The saving is the time from the end of the previous line's operator to the end of the one
        that builds, because Python converts a list in between. It is too large if lines without
        operators lie between the two.
        """
        built = [s for s in self.spans if s.name in CREATION and self._in_model(s)]
        for line, spans in self.by_line(_outermost(span) for span in built):
            if line is None:
                continue
            saved = (
                sum(self._since_previous_line(span) for span in dict.fromkeys(spans)) / self.steps
            )
            yield self.finding(
                "tensor built in forward",
                "a constant tensor is built anew in every call",
                "build it once in __init__ and keep it by register_buffer, so that .to() moves it.",
                line,
                saved,
                len(spans) / self.steps,
                operators=tuple(sorted({span.name for span in spans})),
            )

    def _in_model(self, span: Span) -> bool:
        detail = span.detail
        return (
            detail is not None
            and not detail.backward
            and (detail.module is not None or "forward" in detail.ranges)
        )

    def _since_previous_line(self, span: Span) -> float:
        """Return the time since the end of the previous operator that belongs to another line."""
        siblings = self._top_level(span)
        position = siblings.index(span)
        line = span.detail.line if span.detail else None
        for before in reversed(siblings[:position]):
            detail = before.detail
            if detail is None or detail.line != line or before.name in CREATION:
                return span.end_us - before.end_us
        return span.end_us - (span.parent.start_us if span.parent else span.start_us)

    def _top_level(self, span: Span) -> list[Span]:
        if span.parent is not None:
            return span.parent.children
        return [
            other
            for window in self.windows
            if window.start_us <= span.start_us < window.end_us
            for other in window.spans
            if other.parent is None and other.thread == span.thread
        ]

    def copies_in_forward(self) -> Iterator[Finding]:
        """Find copies to the device in the forward. The saving is the larger of the copies' device
        time and the host's time in the calls."""
        copies = [
            span
            for span in self.spans
            if self._in_model(span)
            and any(
                k.kind == "copy" and is_transfer(k.name) and "DtoH" not in k.name
                for k in _launched(span)
            )
        ]
        for line, spans in self.by_line(_outermost(span) for span in copies):
            unique = list(dict.fromkeys(spans))
            saved = sum(max(device_us(span), span.duration_us) for span in unique) / self.steps
            yield self.finding(
                "copy to the device in forward",
                "the forward copies from the host",
                "make the tensor on the device, or keep it there as a buffer.",
                line,
                saved,
                len(unique) / self.steps,
            )

    def pageable_copies(self) -> Iterator[Finding]:
        """Find copies from pageable memory. The saving is half of their time, because pinned copies
        run at about twice the rate and overlap."""
        pageable = [
            span for span in self.spans if any(is_pageable(k.name) for k in _launched(span))
        ]
        for line, spans in self.by_line(_outermost(span) for span in pageable):
            unique = list(dict.fromkeys(spans))
            copied = sum(k.bytes or 0 for span in unique for b in span.walk() for k in b.kernels)
            saved = sum(device_us(span) for span in unique) / 2 / self.steps
            yield self.finding(
                "pageable copy",
                f"{copied / self.steps / 1e6:.2f} MB per step are copied from pageable memory",
                "pin the batch (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with "
                "non_blocking=True.",
                line,
                saved,
                len(unique) / self.steps,
            )

    # -- the loader and the host ------------------------------------------------------------------

    def starving_loader(self) -> Iterator[Finding]:
        """Find waits for the loader. The saving is the whole wait, because workers prepare the next
        batch while this one computes."""
        waits: list[Span] = [
            span
            for window in self.windows
            for span in window.spans
            if span.kind == "range" and span.name.startswith("enumerate(DataLoader)#")
        ]
        saved = sum(span.duration_us for span in waits) / self.steps
        if waits and saved / self.split.step_us >= STARVING_SHARE:
            yield self.finding(
                "loader starves the model",
                "the step waits for the next batch",
                "give the DataLoader workers (num_workers, prefetch_factor, persistent_workers), "
                "or prepare the data once.",
                None,
                saved,
                len(waits) / self.steps,
            )

    def launch_bound(self) -> Iterator[Finding]:
        """Find a step dominated by overhead. The saving is the overhead, most of which a captured
        or compiled step avoids."""
        share = self.split.overhead_us / self.split.step_us
        calls = sum(is_work(span.name) and not _has_work_below(span) for span in self.spans)
        if share < OVERHEAD_SHARE or calls < REPEATED_CALLS * self.steps:
            return
        line, _ = max(
            ((line, len(spans)) for line, spans in self.by_line(self.spans) if line),
            key=lambda pair: pair[1],
            default=(None, 0),
        )
        waits = "the device waits for the host" if self.on_gpu else "goes to Python and dispatch"
        yield self.finding(
            "launch-bound",
            f"{share:.0%} of the step {waits}: {calls / self.steps:.0f} operators of "
            f"{self.split.step_us / max(calls / self.steps, 1):.1f} us each on average",
            "make fewer, larger operators: torch.compile"
            + ("(mode='reduce-overhead') or a CUDA graph" if self.on_gpu else "")
            + ", fused operators (fuselab.fuse), a larger batch.",
            line,
            self.split.overhead_us,
            calls / self.steps,
        )

    def repeated_small_operators(self) -> Iterator[Finding]:
        """Find small operators repeated on one line. The saving is all calls but one, because one
        call on the stacked inputs costs about one dispatch."""
        groups: dict[tuple[SourceLine, str], list[Span]] = defaultdict(list)
        for span in self.spans:
            detail = span.detail
            if detail is None or detail.line is None or detail.backward or not is_work(span.name):
                continue
            if _outermost_work(span) is span and self._is_small(span):
                groups[detail.line, span.name].append(span)
        for (line, name), spans in groups.items():
            calls = len(spans) / self.steps
            if calls < REPEATED_CALLS:
                continue
            total = sum(span.duration_us for span in spans) / self.steps
            yield self.finding(
                "repeated small operator",
                f"{calls:.0f} small calls of {name} on this line",
                "batch them into one call: stack the operands (one table with offsets, one batched "
                "matmul, one cat) so that the loop disappears.",
                line,
                total * (1 - 1 / calls),
                calls,
                operators=(name,),
            )

    def _is_small(self, span: Span) -> bool:
        if self.on_gpu:
            return device_us(span) < span.duration_us
        return touched_bytes(span) <= DISPATCH_BYTES or not (
            is_memory_op(span) or is_compute_op(span.name)
        )

    # -- work that need not be done ---------------------------------------------------------------

    def quadratic_lookups(self) -> Iterator[Finding]:
        """Find comparisons of every value with every entry.

        The saving is the comparison and every operator that reads its result; a search or an index
        costs B log V instead of B x V.
        """
        for line, spans in self.by_line(s for s in self.spans if _is_lookup(s)):
            results = {key for span in spans for key in _made(span)}
            readers = [
                span
                for span in self.spans
                if span.detail is not None
                and span.name.startswith("aten::")
                and not span.detail.backward
                and (span.parent is None or not span.parent.name.startswith("aten::"))
                and any(use.storage in results for use in span.detail.inputs)
            ]
            involved = dict.fromkeys([*(_outermost(span) for span in spans), *readers])
            if self.on_gpu:
                saved = sum(device_us(span) for span in involved) / self.steps
            else:
                saved = sum(span.duration_us for span in involved) / self.steps
            largest = max(_made_bytes(span) for span in spans)
            yield self.finding(
                "quadratic look-up",
                f"every value is compared with every entry: {largest:,} comparisons in one call",
                "look up by index: torch.searchsorted in the sorted entries, or an id-to-row "
                "table; or hash by modulus.",
                line,
                saved,
                len(spans) / self.steps,
                operators=tuple(dict.fromkeys(span.name for span in involved)),
            )

    def blown_up_operands(self) -> Iterator[Finding]:
        """Find large pointwise results made only for a matrix product.

        The saving is all of the pointwise operator, because a kernel that makes the operand tile by
        tile inside the product neither writes it nor reads it back.
        """
        products = {
            use.storage
            for op in self.details.ops
            if is_compute_op(op.name) and not op.backward
            for use in op.inputs
        }
        blown = [
            span
            for span in self.spans
            if is_pointwise(span.name)
            and span.detail is not None
            and not span.detail.backward
            and _made_bytes(span) >= BLOWN_UP_BYTES
            and _made_bytes(span) >= BLOWN_UP * _given_bytes(span)
            and not _made(span).isdisjoint(products)
        ]
        for line, spans in self.by_line(blown):
            size = max(_made_bytes(span) for span in spans)
            yield self.finding(
                "blown-up operand",
                f"{spans[0].name} writes {size / 1e6:.1f} MB from "
                f"{_given_bytes(spans[0]) / 1e6:.2f} MB, "
                "only for a matrix product to read them",
                "make the operand inside the product's kernel, or rewrite the product so that it "
                "is never needed.",
                line,
                sum(_inclusive_us(span, self.on_gpu) for span in spans) / self.steps,
                len(spans) / self.steps,
                bytes_saved=2 * sum(_made_bytes(span) for span in spans) // self.steps,
                operators=(spans[0].name,),
            )

    def dense_embedding_gradients(self) -> Iterator[Finding]:
        """Find embedding gradients written for whole tables.

        The saving is the share of the gradient's time that falls on rows the batch did not touch.
        An optimizer then updates as many rows, which is not counted.
        """
        dense = [
            span
            for span in self.spans
            if span.name == "aten::embedding_dense_backward"
            and _made_bytes(span) > _given_bytes(span) > 0
        ]
        for line, spans in self.by_line(dense):
            made = sum(map(_made_bytes, spans)) / self.steps
            touched = sum(map(_given_bytes, spans)) / self.steps
            saved = sum(
                _inclusive_us(span, self.on_gpu) * (1 - _given_bytes(span) / _made_bytes(span))
                for span in spans
            )
            yield self.finding(
                "dense embedding gradient",
                f"{made / 1e6:.2f} MB of gradient are written for whole tables, of which the "
                f"batch touched {touched / 1e6:.2f} MB",
                "nn.Embedding(sparse=True) with an optimizer that takes sparse gradients, or a "
                "backward that updates the touched rows.",
                line,
                saved / self.steps,
                len(spans) / self.steps,
                operators=("aten::embedding_dense_backward",),
            )

    def chains(self) -> Iterator[Finding]:
        """Find chains of operators that could be one kernel.

        The saving is the share of the large members' time for the traffic that one kernel would not
        need, and all dispatches but one for the small members.
        """
        cost: dict[int, float] = defaultdict(float)
        for span in self.spans:
            if span.detail is not None:
                cost[id(span.detail)] += _inclusive_us(span, self.on_gpu) / self.steps
        groups: dict[tuple[Any, ...], list[Chain]] = defaultdict(list)
        for chain in find_chains(self.details.ops):
            groups[chain.lines, chain.names, chain.backward].append(chain)
        for (lines, names, backward), chains in groups.items():
            saved = sum(chain.saved_us(cost) for chain in chains)
            bytes_saved = sum(chain.bytes_saved for chain in chains)
            short = ", ".join(name.removeprefix("aten::") for name in names[:6])
            more = f" and {len(names) - 6} more" if len(names) > 6 else ""
            times = f", {len(chains)} times" if len(chains) > 1 else ""
            in_optimizer = any("ptimizer" in name for name in chains[0].calls[0].op.ranges)
            yield self.finding(
                "chain",
                f"{len(names)} {'backward ' if backward else ''}operators could be one kernel"
                f"{times}: {short}{more}; {bytes_saved / 1e6:.2f} MB less to move",
                _advice_on_a_chain(names, in_optimizer),
                lines[0] if lines else None,
                saved,
                float(len(chains)),
                bytes_saved=bytes_saved,
                operators=names,
            )


def _advice_on_a_chain(names: Sequence[str], in_optimizer: bool) -> str:
    if in_optimizer:
        return "give the optimizer fused=True: one kernel updates every parameter."
    compiled = "fuselab explain shows whether torch.compile fuses it."
    without = sorted({name.removeprefix("aten::") for name in names if not is_covered(name)})
    if not without:
        return (
            "fuselab.fuse(model) puts one kernel in its place where that is faster: the library's, "
            f"or one that it writes. {compiled}"
        )
    return (
        "fuselab.fuse(model) replaces it where the library has the operator, and writes kernels "
        f"for the parts beside {', '.join(without)}. {compiled}"
    )


def _inclusive_us(span: Span, on_gpu: bool) -> float:
    return device_us(span) if on_gpu else span.duration_us


def _outermost(span: Span) -> Span:
    """Return the whole call on the user's line that ``span`` is part of."""
    while span.parent is not None and span.parent.name.startswith("aten::"):
        span = span.parent
    return span


def _outermost_work(span: Span) -> Span:
    """Return the outermost operator around ``span`` that touches elements, which views do not."""
    found = span
    for above in span.ancestors():
        if above.kind == "op" and is_work(above.name):
            found = above
    return found


def _has_work_below(span: Span) -> bool:
    return any(below is not span and is_work(below.name) for below in span.walk())


def _launched(span: Span) -> list[Kernel]:
    """Return the kernels that this call launched itself."""
    return [
        *span.kernels,
        *(k for child in span.children if child.kind == "runtime" for k in child.kernels),
    ]


def _launcher(kernel: Kernel) -> str:
    """Return the operator that launched a kernel, with its line."""
    span = kernel.span
    while span is not None and span.kind != "op":
        span = span.parent
    if span is None:
        return plain(kernel.name, 60)
    outer = _outermost(span)
    where = f" ({outer.detail.line})" if outer.detail and outer.detail.line else ""
    return f"{outer.name}{where}"


def _is_lookup(span: Span) -> bool:
    """Return whether this is a broadcast equality with a result much larger than either operand."""
    if span.name not in ("aten::eq", "aten::ne") or span.detail is None:
        return False
    largest = max((use.numel for use in span.detail.inputs), default=0)
    made = _made_bytes(span)  # one byte per element, since the result is boolean
    return made >= LOOKUP_NUMEL and made >= LOOKUP_GROWTH * largest


def _given_bytes(span: Span) -> int:
    return sum(use.bytes for use in span.detail.inputs) if span.detail else 0


def _made_bytes(span: Span) -> int:
    """Return the bytes of the largest tensor that the call allocated."""
    if span.detail is None:
        return 0
    return max((a.bytes for op in span.detail.walk() for a in op.allocations), default=0)


def _made(span: Span) -> set[tuple[int, int]]:
    if span.detail is None:
        return set()
    return {a.storage for op in span.detail.walk() for a in op.allocations if a.bytes > 0}
