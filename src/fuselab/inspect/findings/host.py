"""Findings on the host: what makes the device wait, and what dispatch costs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from math import prod

from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import (
    Search,
    does_work,
    has_work_below,
    launched,
    launcher,
    made,
    outermost,
    outermost_work,
)
from fuselab.inspect.kineto import Detail, Span, Storage
from fuselab.inspect.profile_tables import device_us
from fuselab.inspect.user_code import SourceLine
from fuselab.inspect.work_kinds import CREATION, HOST_SYNC, is_pageable, is_transfer
from fuselab.report.numbers import byte_count, duration

STARVING_SHARE = 0.1  # the least share of the step spent in the loader for a finding
OVERHEAD_SHARE = 0.25  # the least share of overhead for a step to be called launch-bound
REPEATED_CALLS = 8  # calls of one small operator from one line, per step
FEW_BLOCKS_SHARE = 0.5  # the least share of the GPU's time in kernels of too few blocks
FEW_BLOCKS_IDLE = 0.2  # the least share of the step in which multiprocessors have no block

_SIZE_OF = re.compile(r"\.(?:shape|size\(|numel\()|\blen\(")  # a size that the inputs decide

# -- the host waits for the device ------------------------------------------------------------


def host_syncs(search: Search) -> Iterator[Finding]:
    """Find reads of device values by the host.

    On a GPU the saving is not the wait, which is work that must be done anyway: it is the time for
    which the device has nothing to do afterwards, because the host could not run ahead. On a CPU it
    is the time in the call. The optimizer of torch reads its own step counter on the host, which
    costs nothing on a GPU and is not the user's.
    """
    reading = [
        span
        for span in search.spans
        if span.name in HOST_SYNC and not _in_optimizer(span) and _waits(search, span)
    ]
    for line, spans in search.by_line(reading):
        outer = [outermost(span) for span in spans]
        what = ", ".join(sorted({span.name for span in outer}))
        waited = _waited_for(search, outer)
        saved = sum(
            _idle_after(search, span) if search.on_gpu else span.duration_us for span in outer
        )
        yield search.finding(
            "host sync",
            f"the host reads a value back ({what})"
            + (f"; it waits for {waited}, then the device waits for the host" if waited else ""),
            "keep the value on the device (torch.where, masks, counters as tensors) and "
            "read it once every many steps"
            + ("." if search.on_gpu else "; on a GPU the whole queue drains here."),
            line,
            saved / search.steps,
            len(spans) / search.steps,
            operators=tuple(sorted({span.name for span in outer})),
        )


def _in_optimizer(span: Span) -> bool:
    return any(above.name.startswith("Optimizer.step#") for above in span.ancestors())


def _waits(search: Search, span: Span) -> bool:
    """Return whether a read waits for a device; that of a tensor on the host does not."""
    if not search.on_gpu:
        return True
    return any(below.kind == "runtime" for below in outermost(span).walk())


def _idle_after(search: Search, span: Span) -> float:
    """Return for how long the device is idle between the work waited for and the next."""
    window = next(w for w in search.windows if w.start_us <= span.start_us < w.end_us)
    ended = [kernel.end_us for kernel in window.kernels if kernel.start_us <= span.end_us]
    later = [kernel.start_us for kernel in window.kernels if kernel.start_us > span.end_us]
    idle_from = max(ended, default=span.start_us)
    return max(min(later, default=window.end_us) - max(idle_from, span.start_us), 0.0)


def _waited_for(search: Search, spans: Sequence[Span]) -> str:
    """Return the operator whose kernels ran longest while the host waited in these calls."""
    waited: dict[str, float] = defaultdict(float)
    for window in search.windows:
        for span in spans:
            for kernel in window.kernels:
                overlap = min(kernel.end_us, span.end_us) - max(kernel.start_us, span.start_us)
                if overlap > 0 and kernel.kind == "kernel":
                    waited[launcher(kernel)] += overlap
    return max(waited, key=lambda name: waited[name]) if waited else ""


# -- tensors made where they need not be ------------------------------------------------------


def tensors_built(search: Search) -> Iterator[Finding]:
    """Find constant tensors built in every forward, except in a library's module.

    What an operator builds for itself, as attention its causal mask, is not the user's to mend: the
    call on the user's line must build a tensor, or be given none. A tensor that is written into
    later, as the sums of a scatter, is no constant. The saving is the time from the end of the
    previous line's operator to the end of the one that builds, because Python converts a list in
    between. It is too large if lines without operators lie between the two.
    """
    built = [s for s in search.spans if s.name in CREATION and search.in_own_code(s)]
    changed = _changed_later(search)
    for line, builders in search.by_line(filter(_builds, map(outermost, built))):
        spans = [span for span in builders if not made(span) & changed]
        if line is None or not spans:
            continue
        sized = " of the largest size, and take a slice" * bool(_SIZE_OF.search(line.text))
        saved = (
            sum(_since_previous_line(search, span) for span in dict.fromkeys(spans)) / search.steps
        )
        in_module = any(span.detail is not None and span.detail.module for span in spans)
        yield search.finding(
            "tensor built in forward",
            "a constant tensor is built anew in every call",
            f"build it once in __init__{sized}, and keep it by register_buffer, so that .to() "
            "moves it."
            if in_module
            else f"build it once{sized}, outside of the function, and pass it.",
            line,
            saved,
            len(spans) / search.steps,
            operators=tuple(sorted({span.name for span in spans})),
        )


def _changed_later(search: Search) -> set[Storage]:
    """Return the tensors that another operator than the one that made them writes into."""
    makers: dict[Storage, Detail] = {}
    changed: set[Storage] = set()
    for call in search.calls:
        outer = [op for op in _with_parents(call.op) if op.name.startswith("aten::")][-1:]
        for storage in call.writes:
            if outer and makers.setdefault(storage, outer[0]) is not outer[0]:
                changed.add(storage)
    return changed


def _builds(span: Span) -> bool:
    return span.name in CREATION or (span.detail is not None and not span.detail.inputs)


def _since_previous_line(search: Search, span: Span) -> float:
    """Return the time since the end of the previous operator that belongs to another line."""
    siblings = _top_level(search, span)
    position = siblings.index(span)
    line = span.detail.line if span.detail else None
    for before in reversed(siblings[:position]):
        detail = before.detail
        if detail is None or detail.line != line or before.name in CREATION:
            return span.end_us - before.end_us
    return span.end_us - (span.parent.start_us if span.parent else span.start_us)


def _top_level(search: Search, span: Span) -> list[Span]:
    if span.parent is not None:
        return span.parent.children
    return [
        other
        for window in search.windows
        if window.start_us <= span.start_us < window.end_us
        for other in window.spans
        if other.parent is None and other.thread == span.thread
    ]


def copies_in_forward(search: Search) -> Iterator[Finding]:
    """Find copies to the device in the forward. The saving is the larger of the copies' device
    time and the host's time in the calls."""
    copies = [
        span
        for span in search.spans
        if search.in_model(span)
        and any(
            k.kind == "copy" and is_transfer(k.name) and "DtoH" not in k.name
            for k in launched(span)
        )
    ]
    for line, spans in search.by_line(outermost(span) for span in copies):
        unique = list(dict.fromkeys(spans))
        saved = sum(max(device_us(span), span.duration_us) for span in unique) / search.steps
        yield search.finding(
            "copy to the device in forward",
            "the forward copies from the host",
            "make the tensor on the device, or keep it there as a buffer.",
            line,
            saved,
            len(unique) / search.steps,
        )


def pageable_copies(search: Search) -> Iterator[Finding]:
    """Find copies from pageable memory. The saving is half of their time, because pinned copies
    run at about twice the rate and overlap."""
    pageable = [span for span in search.spans if any(is_pageable(k.name) for k in launched(span))]
    for line, spans in search.by_line(outermost(span) for span in pageable):
        unique = list(dict.fromkeys(spans))
        copied = sum(k.bytes or 0 for span in unique for b in span.walk() for k in b.kernels)
        saved = sum(device_us(span) for span in unique) / 2 / search.steps
        yield search.finding(
            "pageable copy",
            f"{byte_count(copied / search.steps)} per step are copied from pageable memory",
            "pin the batch (DataLoader(pin_memory=True), tensor.pin_memory()) and copy with "
            "non_blocking=True.",
            line,
            saved,
            len(unique) / search.steps,
        )


# -- the loader and the host ------------------------------------------------------------------


def starving_loader(search: Search) -> Iterator[Finding]:
    """Find waits for the loader. The saving is the whole wait, because workers prepare the next
    batch while this one computes."""
    waits: list[Span] = [
        span
        for window in search.windows
        for span in window.spans
        if span.kind == "range" and span.name.startswith("enumerate(DataLoader)#")
    ]
    saved = sum(span.duration_us for span in waits) / search.steps
    has_workers = any("MultiProcessing" in span.name for span in waits)
    if waits and saved / search.split.step_us >= STARVING_SHARE:
        yield search.finding(
            "loader starves the model",
            "the step waits for the next batch",
            f"give the DataLoader {'more ' * has_workers}workers (num_workers, prefetch_factor, "
            "persistent_workers), or prepare the data once.",
            None,
            saved,
            len(waits) / search.steps,
        )


def launch_bound(search: Search) -> Iterator[Finding]:
    """Find a step dominated by overhead. The saving is the overhead, most of which a captured
    or compiled step avoids."""
    share = search.split.overhead_us / search.split.step_us
    calls = sum(does_work(span) and not has_work_below(span) for span in search.spans)
    if share < OVERHEAD_SHARE or calls < REPEATED_CALLS * search.steps:
        return
    line, _ = max(
        ((line, len(spans)) for line, spans in search.by_line(search.spans) if line),
        key=lambda pair: pair[1],
        default=(None, 0),
    )
    part = f"{100 * share:.0f} % of the step"
    waits = f"the device waits for the host for {part}"
    if not search.on_gpu:
        waits = f"{part} goes to Python and dispatch"
    yield search.finding(
        "launch-bound",
        f"{waits}: {calls / search.steps:.0f} operators of "
        f"{duration(search.split.step_us / max(calls / search.steps, 1))} each on average",
        _advice_on_launches(search),
        line,
        search.split.overhead_us,
        calls / search.steps,
    )


def _advice_on_launches(search: Search) -> str:
    if not search.on_gpu:
        return (
            "make fewer, larger operators: torch.compile, fused operators (fuselab.fuse), a "
            "larger batch."
        )
    blocked = next(host_syncs(search), None)
    if blocked is None:
        return (
            "nothing in the step waits for the host, so a CUDA graph can carry all of it: "
            "torch.compile(model, mode='reduce-overhead'), or torch.cuda.graph around the step "
            "with inputs that keep their address. Fused operators (fuselab.fuse) and a larger "
            "batch help too."
        )
    where = f" on {blocked.line}" if blocked.line else ""
    return (
        f"mend the host sync{where} first; then a CUDA graph can carry the step "
        "(torch.compile(model, mode='reduce-overhead')). Fused operators (fuselab.fuse) and a "
        "larger batch help too."
    )


def few_blocks(search: Search) -> Iterator[Finding]:
    """Find a step whose kernels are too small for the GPU: fewer blocks than multiprocessors.

    The saving is the share of each such kernel's time in which multiprocessors have no block; a
    batch larger by that factor would take the same time.
    """
    if not search.on_gpu:
        return
    kernels = [
        k
        for w in search.windows
        for k in w.kernels
        if k.kind == "kernel" and k.grid and k.duration_us > 0
    ]
    busy = sum(kernel.duration_us for kernel in kernels)
    processors = search.multiprocessors
    small = [(k, prod(k.grid or ())) for k in kernels if prod(k.grid or ()) < processors]
    spent = sum(kernel.duration_us for kernel, _ in small)
    idle = sum(kernel.duration_us * (1 - blocks / processors) for kernel, blocks in small)
    whole = search.split.step_us * search.steps
    if not kernels or spent < FEW_BLOCKS_SHARE * busy or idle < FEW_BLOCKS_IDLE * whole:
        return
    yield search.finding(
        "batch too small",
        f"{100 * spent / busy:.0f} % of the GPU's time runs kernels of fewer blocks than its "
        f"{processors} multiprocessors",
        "give it more work at a time: a larger batch takes the same time until every "
        "multiprocessor has a block; or run two streams of work side by side.",
        None,
        idle / search.steps,
        len(small) / search.steps,
    )


def repeated_small_operators(search: Search) -> Iterator[Finding]:
    """Find small operators repeated on one line; an optimizer's have a rule of their own.

    Calls that read what others of them led to, as the layers of a model, cannot become one. The
    saving is all calls but one of each such level, because one call on the stacked inputs costs
    about one dispatch.
    """
    groups: dict[tuple[SourceLine, str], list[Span]] = defaultdict(list)
    for span in search.spans:
        detail = span.detail
        if detail is None or detail.line is None or detail.backward or not does_work(span):
            continue
        if outermost_work(span) is span and search.is_small(span) and not _in_optimizer(span):
            groups[detail.line, span.name].append(span)
    for (line, name), spans in groups.items():
        calls = len(spans) / search.steps
        if calls < REPEATED_CALLS:
            continue
        levels = _levels(search, {id(span.detail) for span in spans})
        if calls < REPEATED_CALLS * levels:
            continue
        total = sum(span.duration_us for span in spans) / search.steps
        yield search.finding(
            "repeated small operator",
            f"{calls:.0f} small calls of {name.removeprefix('aten::')} on this line",
            "batch them into one call: stack the operands (one table with offsets, one batched "
            "matmul, one cat) so that the loop disappears.",
            line,
            total * (1 - levels / calls),
            calls,
            operators=(name,),
        )


def _levels(search: Search, members: set[int]) -> int:
    """Return the length of the longest sequence of members, by the ``id`` of their details, in
    which each reads a value that was computed from the one before."""
    levels: dict[Storage, tuple[int, int | None]] = {}  # with the member that left the value
    for call in search.calls:
        member = next((id(op) for op in _with_parents(call.op) if id(op) in members), None)
        reached = 0 if member is None else 1
        for storage in call.reads:
            level, before = levels.get(storage, (0, None))
            # a sum to which several members add in place is no value that they read
            is_sum = storage in call.writes and before is not None
            deeper = member is not None and before != member and not is_sum
            reached = max(reached, level + deeper)
        for storage in call.writes:
            levels[storage] = reached, member
    return max((level for level, _ in levels.values()), default=1) or 1


def _with_parents(op: Detail) -> Iterator[Detail]:
    found: Detail | None = op
    while found is not None:
        yield found
        found = found.parent
