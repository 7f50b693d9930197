"""Findings on matrix products: their precision, their alignment, and attention spelt out."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fuselab.inspect.chains import Call
from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import Search, inclusive_us, made_bytes
from fuselab.inspect.kineto import Detail, Span, Storage, TensorUse
from fuselab.inspect.work_kinds import is_pointwise
from fuselab.report.numbers import byte_count

PRODUCTS_SHARE = 0.2  # the least share of the step in float32 products for a finding
UNALIGNED_SHARE = 0.02  # the least share of the step in unaligned products of one line
# A100, H100 and H200 multiply 7 to 8 times as many TF32 numbers as float32 ones per second; real
# products reach about half of that. It counts only where the device's own rates are not known.
TF32_GAIN = 4.0
ALIGNED_BYTES = 16  # a tensor core's loads; cuBLAS takes slower kernels for other row lengths
ATTENTION_STEPS = 8  # pointwise operators at most between a product and its softmax

_REDUCED = re.compile(r"tf32|s1688|s16816|s884|h16816|h1688|bf16|hgemm|f16f16", re.IGNORECASE)
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_addmm_activation")


@dataclass(frozen=True)
class Product:
    """One matrix product: ``batch`` times m x k by k x n."""

    span: Span
    batch: int
    m: int
    n: int
    k: int
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        """The least that it moves: both operands and the result once."""
        numel = self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)
        return numel * self.dtype.itemsize


def products(spans: Sequence[Span]) -> list[Product]:
    """Return the matrix products among the calls whose shapes are known."""
    found = []
    for span in spans:
        if span.name not in _PRODUCTS or span.detail is None:
            continue
        matrices = [use for use in span.detail.inputs if len(use.sizes) >= 2][-2:]
        product = _product(span, matrices)
        if product is not None:
            found.append(product)
    return found


def _product(span: Span, matrices: Sequence[TensorUse]) -> Product | None:
    if len(matrices) != 2:
        return None
    left, right = (use.sizes for use in matrices)
    if len(left) != len(right) or left[-1] != right[-2]:
        return None
    batch = left[0] if len(left) == 3 else 1
    return Product(span, batch, left[-2], right[-1], left[-1], matrices[0].dtype)


def _is_float32_kernel(span: Span) -> bool:
    """Return whether a call's kernels multiply float32 numbers in full, not as TF32."""
    names = [kernel.name for below in span.walk() for kernel in below.kernels]
    return bool(names) and not any(_REDUCED.search(name) for name in names)


def float32_products(search: Search) -> Iterator[Finding]:
    """Find a step on a GPU that spends much of its time in full float32 products.

    The saving is what TF32 would save: each product's time over the ratio of the device's measured
    rates (4 if they are not known), but at least the time of its traffic.
    """
    if not search.on_gpu:
        return
    full = [
        product
        for product in products(search.spans)
        if product.dtype == torch.float32 and _is_float32_kernel(product.span)
    ]
    us = sum(inclusive_us(product.span, True) for product in full) / search.steps
    if us < PRODUCTS_SHARE * search.split.step_us:
        return
    predicted = sum(_tf32_us(product, search) for product in full) / search.steps
    rate = sum(product.flops for product in full) / search.steps / us / 1e6
    line = max(search.by_line(p.span for p in full), key=lambda pair: _total_us(pair[1]))[0]
    yield search.finding(
        "float32 products",
        f"products in full float32 take {us / 1e3:.3g} ms of the step, at {rate:.3g} TFLOP/s; as "
        f"TF32 they would take about {predicted / 1e3:.2g} ms",
        "torch.set_float32_matmul_precision('high') rounds their operands to 11 bits (TF32); "
        "torch.autocast('cuda', torch.bfloat16) to 8 bits, and halves what is moved. --try runs "
        "both and shows what they do to the outputs.",
        line,
        us - predicted,
        len(full) / search.steps,
        operators=tuple(dict.fromkeys(product.span.name for product in full)),
    )


def _tf32_us(product: Product, search: Search) -> float:
    us = inclusive_us(product.span, True)
    ceilings = search.ceilings
    if ceilings is None:
        return us / TF32_GAIN
    rates = ceilings.matmul_tflops
    gain = rates["tf32"] / rates["fp32"] if {"tf32", "fp32"} <= rates.keys() else TF32_GAIN
    return min(us, max(us / gain, product.bytes / ceilings.best_gbps / 1e3))


def _total_us(spans: Sequence[Span]) -> float:
    return sum(inclusive_us(span, True) for span in spans)


def unaligned_products(search: Search) -> Iterator[Finding]:
    """Find products for tensor cores whose rows do not begin on 16 bytes.

    The saving is half of their time, about what NVIDIA states for padding K and N to 16 bytes.
    """
    if not search.on_gpu:
        return
    by_span = {id(product.span): product for product in products(search.spans)}
    unaligned = [
        product.span
        for product in by_span.values()
        if _on_tensor_cores(product)
        and (product.k * product.dtype.itemsize) % ALIGNED_BYTES
        + (product.n * product.dtype.itemsize) % ALIGNED_BYTES
    ]
    for line, spans in search.by_line(unaligned):
        us = _total_us(spans) / search.steps
        if us < UNALIGNED_SHARE * search.split.step_us:
            continue
        one = by_span[id(max(spans, key=lambda span: inclusive_us(span, True)))]
        multiple = ALIGNED_BYTES // one.dtype.itemsize
        yield search.finding(
            "unaligned product",
            f"{one.m} x {one.k} by {one.k} x {one.n} in {str(one.dtype).removeprefix('torch.')}: "
            f"K or N is no multiple of {multiple}, so rows do not begin on 16 bytes",
            f"pad K and N to a multiple of {multiple} (features, vocabulary, classes), and leave "
            "the padding out of the result.",
            line,
            us / 2,
            len(spans) / search.steps,
            operators=tuple(dict.fromkeys(span.name for span in spans)),
        )


def _on_tensor_cores(product: Product) -> bool:
    half = product.dtype in (torch.float16, torch.bfloat16)
    return half or (product.dtype == torch.float32 and not _is_float32_kernel(product.span))


# --- attention -----------------------------------------------------------------------------------


def spelt_out_attention(search: Search) -> Iterator[Finding]:
    """Find a product, a softmax of it and a product with that: attention written out.

    The saving is the time of everything between the two products, forward and backward, because
    fused attention never writes the scores to memory.
    """
    calls = search.calls
    last: dict[Storage, Call] = {}
    source: dict[int, Call | None] = {}  # which call wrote the largest tensor that a call reads
    found: dict[Any, list[list[Call]]] = defaultdict(list)  # by the line, as layers share theirs
    for position, call in enumerate(calls):
        largest = max(call.reads, key=lambda storage: call.reads[storage], default=None)
        source[id(call)] = last.get(largest) if largest is not None else None
        if call.op.name == "aten::_softmax" and not call.op.backward:
            before = _back_to_a_product(call, source)
            after = _forth_to_a_product(call, calls[position + 1 :])
            if before is not None and after is not None:
                found[call.op.line].append([*before, call, *after])
        last.update(dict.fromkeys(call.writes, call))
    for several in found.values():
        yield _attention(search, several)


def _is_product(call: Call) -> bool:
    return call.op.name in ("aten::bmm", "aten::baddbmm", "aten::mm")


def _back_to_a_product(call: Call, source: Mapping[int, Call | None]) -> list[Call] | None:
    """Return the pointwise calls between a product and ``call``; None if no product leads there."""
    found: list[Call] = []
    for _ in range(ATTENTION_STEPS):
        before = source[id(call)]
        if before is None:
            return None
        if _is_product(before):
            return found
        if not is_pointwise(before.op.name):
            return None
        found.insert(0, before)
        call = before
    return None


def _forth_to_a_product(call: Call, later: Sequence[Call]) -> list[Call] | None:
    """Return the pointwise calls between ``call`` and the product that reads its result."""
    found: list[Call] = []
    written = set(call.writes)
    for following in later:
        if following.op.backward or not written.intersection(following.reads):
            continue
        if _is_product(following):
            return found
        if not is_pointwise(following.op.name) or len(found) == ATTENTION_STEPS:
            return None
        found.append(following)
        written = set(following.writes)
    return None


def _attention(search: Search, several: Sequence[Sequence[Call]]) -> Finding:
    """Return the finding of the attentions of one line, each the calls between its products."""
    calls = [call for between in several for call in between]
    members = {id(call.op): call for call in calls}
    lines = {call.op.line for call in calls}
    backward = {
        id(op)
        for between in several
        for op in search.details.ops
        if op.backward and op.line in lines and _is_backward_of(op, between)
    }
    saved = sum(search.cost.get(member, 0.0) for member in {*members, *backward})
    softmaxes = [call.op for call in calls if call.op.name == "aten::_softmax"]
    spans = [span for span in search.spans if any(span.detail is op for op in softmaxes)]
    scores = max((made_bytes(span) for span in spans), default=0)
    times = f", {len(several)} times" if len(several) > 1 else ""
    return search.finding(
        "attention spelt out",
        f"product, softmax and product write the {byte_count(scores)} of scores to memory and "
        f"read them back{times}",
        "F.scaled_dot_product_attention(query, key, value) computes the same in one kernel and "
        "never stores the scores; its scale=, attn_mask= and is_causal= take the place of the "
        "operators between.",
        softmaxes[0].line,
        saved,
        float(len(several)),
        bytes_saved=sum(call.bytes for call in calls),
        operators=tuple(call.op.name for call in several[0]),
    )


_BACKWARD_NAMES = {"aten::_softmax": "aten::_softmax_backward_data"}


def _is_backward_of(op: Detail, between: Sequence[Call]) -> bool:
    """Return whether a backward operator works on the scores: it reads as many elements."""
    names = {_BACKWARD_NAMES.get(call.op.name, call.op.name) for call in between}
    scores = max(call.numel for call in between)
    return op.name in names and any(use.numel == scores for use in op.inputs)
