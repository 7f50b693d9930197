"""Findings in the backward: gradients far larger than what the batch touched."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import (
    Search,
    inclusive_us,
    made,
    made_bytes,
)
from fuselab.inspect.kineto import Span, Storage, TensorUse
from fuselab.inspect.user_code import SourceLine
from fuselab.report.numbers import byte_count

SLICES = 8  # slices of one line, per step, whose gradients are as large as the whole
SLICED = 4  # the least ratio of those gradients to the slices

_BY_INDEX = ("aten::_index_put_impl_", "aten::index_select_backward")
_ENGINE = "autograd::engine::evaluate_function"


def dense_embedding_gradients(search: Search) -> Iterator[Finding]:
    """Find gradients of tables that are written whole, for a batch that touched few rows.

    Tables are those of nn.Embedding and nn.EmbeddingBag, and parameters whose rows are taken by an
    index. The saving is the time in which the gradient is filled with zeros, or the whole time of
    an operator that does not fill it apart, times the share of the rows that the batch did not
    touch. An optimizer then updates as many rows, which is not counted.
    """
    accumulated = {
        use.storage
        for op in search.details.ops
        if op.name.endswith("AccumulateGrad")
        for use in op.inputs
    }
    dense: list[Span] = []
    touched: dict[int, int] = {}
    for span in search.spans:
        rows_bytes = _touched_bytes(span, accumulated)
        if 0 < rows_bytes < _whole_bytes(span):
            dense.append(span)
            touched[id(span)] = rows_bytes
    for line, spans in search.by_line(dense):
        whole = sum(map(_whole_bytes, spans)) / search.steps
        rows = sum(touched[id(span)] for span in spans) / search.steps
        saved = sum(
            _filling_us(span, search.on_gpu) * (1 - touched[id(span)] / _whole_bytes(span))
            for span in spans
        )
        yield search.finding(
            "dense embedding gradient",
            f"{byte_count(whole)} of gradient are written for whole tables, of which the "
            f"batch touched {byte_count(rows)}",
            _advice_on_tables(spans),
            line,
            saved / search.steps,
            len(spans) / search.steps,
            operators=tuple(dict.fromkeys(span.name for span in spans)),
        )


def _touched_bytes(span: Span, accumulated: set[Storage]) -> int:
    """Return the bytes of the rows that a table's gradient is of, at most; 0 of another call."""
    inputs = span.detail.inputs if span.detail else ()
    if span.name == "aten::embedding_dense_backward" and inputs:
        return _numel_bytes(inputs[0])
    if span.name == "aten::_embedding_bag_dense_backward" and len(inputs) > 1:
        gradient, ids = inputs[:2]
        return ids.numel * gradient.sizes[-1] * gradient.dtype.itemsize
    if span.name == "aten::_index_put_impl_" and len(inputs) > 1:
        table, rows = inputs[:2]
        by_row = len(table.sizes) == 2 and table.sizes[-1:] == rows.sizes[-1:]
        return _numel_bytes(rows) if by_row and table.storage in accumulated else 0
    if span.name == "aten::index_select_backward" and inputs:
        return _numel_bytes(inputs[0]) if made(span) & accumulated else 0
    return 0


def _numel_bytes(use: TensorUse) -> int:
    """Return the bytes of all elements, also of an expanded gradient, which stores each once."""
    return use.numel * use.dtype.itemsize


def _whole_bytes(span: Span) -> int:
    if span.name == "aten::_index_put_impl_" and span.detail is not None:
        return span.detail.inputs[0].bytes
    return made_bytes(span)


def _filling_us(span: Span, on_gpu: bool) -> float:
    """Return the time of the zeros below a gradient's operator, or of all of it without them."""
    above = span.parent if span.name in _BY_INDEX and span.parent is not None else span
    fills = [below for below in above.walk() if below.name == "aten::zero_"]
    filling = sum(inclusive_us(fill, on_gpu) for fill in fills)
    return filling or inclusive_us(span, on_gpu)


def _advice_on_tables(spans: Sequence[Span]) -> str:
    if any(span.name in _BY_INDEX for span in spans):
        return (
            "take the rows by F.embedding(ids, table, sparse=True) with an optimizer that takes "
            "sparse gradients, or by a backward that updates the touched rows."
        )
    bag = any("bag" in span.name for span in spans)
    return (
        f"nn.Embedding{'Bag' * bag}(sparse=True) with an optimizer that takes sparse gradients, "
        "or a backward that updates the touched rows."
    )


def gradients_of_slices(search: Search) -> Iterator[Finding]:
    """Find a loop that slices a tensor: each slice's gradient is a tensor as large as the whole.

    Autograd fills the whole with zeros for every slice, and then adds all of them up, so the cost
    grows with the square of the number of slices. The saving is the time of both but for the share
    of the slices themselves, which `unbind` and `split` write once.
    """
    groups: dict[SourceLine | None, list[Span]] = defaultdict(list)
    for span in search.spans:
        if (
            span.name in ("aten::select_backward", "aten::slice_backward")
            and span.detail
            and span.detail.inputs
        ):
            groups[span.detail.line].append(span)
    for line, spans in groups.items():
        whole = sum(map(made_bytes, spans)) / search.steps
        given = sum(_numel_bytes(span.detail.inputs[0]) for span in spans if span.detail)
        slices = given / search.steps
        if len(spans) < SLICES * search.steps or not 0 < slices * SLICED <= whole:
            continue
        nodes = dict.fromkeys(map(_engine_call, spans))
        saved = sum(inclusive_us(node, search.on_gpu) for node in nodes) * (1 - slices / whole)
        calls = len(spans) / search.steps
        yield search.finding(
            "gradients of slices",
            f"each of {calls:.0f} slices has a gradient as large as the whole tensor: "
            f"{byte_count(whole)} are filled and added up for {byte_count(slices)}",
            "take all slices in one call before the loop, tensor.unbind(dim) or tensor.split(n, "
            "dim), whose backward writes the gradient once.",
            line,
            saved / search.steps,
            calls,
            operators=tuple(dict.fromkeys(span.name for span in spans)),
        )


def _engine_call(span: Span) -> Span:
    """Return the engine's call around a backward operator, which adds gradients up too."""
    for above in span.ancestors():
        if above.name.startswith(_ENGINE):
            return above
    return span
