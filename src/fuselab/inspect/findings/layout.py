"""Findings on how tensors lie in memory: copies into another order, casts, image layouts."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import Search, inclusive_us, outermost
from fuselab.inspect.kineto import Detail, Span, Storage, TensorUse
from fuselab.inspect.profile_tables import device_us
from fuselab.report.numbers import byte_count

STRIDED_SHARE = 0.05  # the least share of the step in strided copies of one line
STRIDED_BYTES = 1 << 18  # smaller tensors cost their dispatch

_LAYOUT_KERNEL = re.compile(r"nchwToNhwc|nhwcToNchw|nchw_to_nhwc|nhwc_to_nchw", re.IGNORECASE)


def strided_copies(search: Search) -> Iterator[Finding]:
    """Find copies of a whole tensor into another order of its dimensions.

    The saving is the copies' time.
    """
    copies = [
        span
        for span in search.spans
        if span.name == "aten::copy_"
        and span.detail is not None
        and not span.detail.backward
        and _reorders(span.detail)
    ]
    for line, spans in search.by_line(copies):
        saved = sum(inclusive_us(span, search.on_gpu) for span in spans) / search.steps
        if line is None or saved < STRIDED_SHARE * search.split.step_us:
            continue
        size = sum(span.detail.inputs[0].bytes for span in spans if span.detail) / search.steps
        causes = ", ".join(sorted({outermost(s).name.removeprefix("aten::") for s in spans}))
        yield search.finding(
            "strided copy",
            f"{byte_count(size)} are copied into another order of the dimensions ({causes})",
            "keep one order from the start: make the tensor in the order in which it is read, "
            "leave out .contiguous() where the next operator takes strides, and let einsum or "
            "matmul read a transposed view.",
            line,
            saved,
            len(spans) / search.steps,
            bytes_saved=2 * int(size),
            operators=("aten::copy_",),
        )


def _reorders(detail: Detail) -> bool:
    """Return whether a copy walks its source in another order than its destination."""
    if len(detail.inputs) < 2:
        return False
    made, given = detail.inputs[:2]
    same = made.sizes == given.sizes and made.dtype == given.dtype
    whole = same and given.bytes >= STRIDED_BYTES and made.bytes == given.bytes
    return whole and _order(made) != _order(given)


def _order(use: TensorUse) -> list[int]:
    """Return the dimensions by their strides; those of one element have no place in it."""
    dims = [dim for dim, size in enumerate(use.sizes) if size > 1]
    return sorted(dims, key=lambda dim: -use.strides[dim])


def casts_there_and_back(search: Search) -> Iterator[Finding]:
    """Find a tensor cast to another dtype and straight back.

    The saving is the time of both casts.
    """
    spans: dict[int, list[Span]] = defaultdict(list)
    for span in search.spans:
        if span.detail is not None:
            spans[id(span.detail)].append(span)
    casts: dict[Storage, Detail] = {}
    for detail in search.details.ops:
        cast = _cast(detail)
        if cast is None:
            continue
        made, given = cast
        first = casts.get(given.storage)
        if first is not None and first.inputs[1].dtype == made.dtype:
            both = [*spans[id(first)], *spans[id(detail)]]
            there, back = (str(use.dtype).removeprefix("torch.") for use in (given, made))
            saved = sum(inclusive_us(span, search.on_gpu) for span in both) / search.steps
            yield search.finding(
                "cast there and back",
                f"{made.numel:,} elements go from {back} to {there} and straight back",
                "leave both casts out; if the value must lose its low bits on purpose, say so in a "
                "comment.",
                detail.line,
                saved,
                2.0,
                bytes_saved=2 * (made.bytes + given.bytes),
                operators=("aten::copy_",),
            )
        casts[made.storage] = detail


def _cast(detail: Detail) -> tuple[TensorUse, TensorUse] | None:
    """Return the result and the source of a copy that changes the dtype of floats."""
    if detail.name != "aten::copy_" or len(detail.inputs) < 2:
        return None
    made, given = detail.inputs[:2]
    floats = made.dtype.is_floating_point and given.dtype.is_floating_point
    changes = made.dtype != given.dtype and made.numel == given.numel > 1
    return (made, given) if floats and changes else None


def converted_convolutions(search: Search) -> Iterator[Finding]:
    """Find kernels that cuDNN runs to bring images into channels-last order and back.

    The saving is the time of those kernels.
    """
    if not search.on_gpu:
        return
    converting = [
        span
        for span in search.spans
        if any(_LAYOUT_KERNEL.search(kernel.name) for kernel in span.kernels)
        or any(
            _LAYOUT_KERNEL.search(kernel.name)
            for child in span.children
            if child.kind == "runtime"
            for kernel in child.kernels
        )
    ]
    if not converting:
        return
    saved = sum(
        kernel.duration_us
        for span in converting
        for below in span.walk()
        for kernel in below.kernels
        if _LAYOUT_KERNEL.search(kernel.name)
    )
    by_line = list(search.by_line(converting))
    line = max(by_line, key=lambda pair: sum(map(device_us, pair[1])))[0]
    yield search.finding(
        "convolutions not in channels-last",
        f"cuDNN brings images into channels-last order and back on {len(by_line)} "
        f"line{'s' if len(by_line) > 1 else ''}, around convolutions that want them so",
        "model = model.to(memory_format=torch.channels_last), and the inputs too: the whole "
        "network then stays in that order. --try times it.",
        line,
        saved / search.steps,
        len(converting) / search.steps,
        operators=tuple(dict.fromkeys(outermost(span).name for span in converting)),
    )
