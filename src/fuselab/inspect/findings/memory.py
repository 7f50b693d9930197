"""Findings in memory: traffic that need not be, and chains that one kernel could compute."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from fuselab.ejection.covered import is_covered
from fuselab.inspect.chains import Chain
from fuselab.inspect.findings.finding import Finding
from fuselab.inspect.findings.search import (
    Search,
    given_bytes,
    inclusive_us,
    made,
    made_bytes,
    outermost,
)
from fuselab.inspect.kineto import Span
from fuselab.inspect.profile_tables import device_us
from fuselab.inspect.user_code import plain
from fuselab.inspect.work_kinds import is_compute_op, is_pointwise
from fuselab.report.numbers import byte_count

LOOKUP_NUMEL = 65536  # the least number of results for a comparison to be a look-up
LOOKUP_GROWTH = 8  # the least ratio of its result to its larger operand
BLOWN_UP = 8  # the least ratio of a pointwise result to its inputs to be called blown up
BLOWN_UP_BYTES = 1 << 20
COMPILED_CHAINS = 3  # the fewest chains for torch.compile to be the answer
COMPILED_SHARE = 0.05  # the least share of the step that they save together


def quadratic_lookups(search: Search) -> Iterator[Finding]:
    """Find comparisons of every value with every entry.

    The saving is the comparison and every operator that reads its result; a search or an index
    costs B log V instead of B x V.
    """
    for line, spans in search.by_line(s for s in search.spans if _is_lookup(s)):
        results = {key for span in spans for key in made(span)}
        readers = [
            span
            for span in search.spans
            if span.detail is not None
            and span.name.startswith("aten::")
            and not span.detail.backward
            and (span.parent is None or not span.parent.name.startswith("aten::"))
            and any(use.storage in results for use in span.detail.inputs)
        ]
        involved = dict.fromkeys([*(outermost(span) for span in spans), *readers])
        if search.on_gpu:
            saved = sum(device_us(span) for span in involved) / search.steps
        else:
            saved = sum(span.duration_us for span in involved) / search.steps
        largest = max(made_bytes(span) for span in spans)
        yield search.finding(
            "quadratic look-up",
            f"every value is compared with every entry: {largest:,} comparisons in one call",
            "look up by index: torch.searchsorted in the sorted entries, or an id-to-row "
            "table; or hash by modulus.",
            line,
            saved,
            len(spans) / search.steps,
            operators=tuple(dict.fromkeys(span.name for span in involved)),
        )


def blown_up_operands(search: Search) -> Iterator[Finding]:
    """Find large pointwise results made only for a matrix product.

    The saving is all of the pointwise operator, because a kernel that makes the operand tile by
    tile inside the product neither writes it nor reads it back.
    """
    products = {
        use.storage
        for op in search.details.ops
        if is_compute_op(op.name) and not op.backward
        for use in op.inputs
    }
    blown = [
        span
        for span in search.spans
        if is_pointwise(span.name)
        and span.detail is not None
        and not span.detail.backward
        and made_bytes(span) >= BLOWN_UP_BYTES
        and made_bytes(span) >= BLOWN_UP * given_bytes(span)
        and not made(span).isdisjoint(products)
    ]
    for line, spans in search.by_line(blown):
        size = max(made_bytes(span) for span in spans)
        yield search.finding(
            "blown-up operand",
            f"{spans[0].name.removeprefix('aten::')} writes {byte_count(size)} from "
            f"{byte_count(given_bytes(spans[0]))}, "
            "only for a matrix product to read them",
            "make the operand inside the product's kernel, or rewrite the product so that it "
            "is never needed.",
            line,
            sum(inclusive_us(span, search.on_gpu) for span in spans) / search.steps,
            len(spans) / search.steps,
            bytes_saved=2 * sum(made_bytes(span) for span in spans) // search.steps,
            operators=(spans[0].name,),
        )


def chains(search: Search) -> Iterator[Finding]:
    """Find chains of operators that could be one kernel.

    The saving is the share of the large members' time for the traffic that one kernel would not
    need, and all dispatches but one for the small members.
    """
    groups: dict[tuple[Any, ...], list[Chain]] = defaultdict(list)
    for chain in search.chains:
        groups[chain.lines, chain.names, chain.backward].append(chain)
    for (lines, names, backward), chains in groups.items():
        saved = sum(chain.saved_us(search.cost) for chain in chains)
        bytes_saved = sum(chain.bytes_saved for chain in chains)
        short = ", ".join(name.removeprefix("aten::") for name in names[:6])
        more = f" and {len(names) - 6} more" if len(names) > 6 else ""
        times = f", {len(chains)} times" if len(chains) > 1 else ""
        in_optimizer = any("ptimizer" in name for name in chains[0].calls[0].op.ranges)
        yield search.finding(
            "chain",
            f"{len(names)} {'backward ' if backward else ''}operators could be one kernel"
            f"{times}: {short}{more}; {byte_count(bytes_saved)} less to move",
            advice_on_a_chain(names, in_optimizer),
            lines[0] if lines else None,
            saved,
            float(len(chains)),
            bytes_saved=bytes_saved,
            operators=names,
            lines=tuple(dict.fromkeys(map(plain, lines))),
        )


def compile_instead(search: Search) -> Iterator[Finding]:
    """Find a step with so many chains that torch.compile, which fuses all of them, is the answer.

    The saving is that of all chains outside the optimizer together.
    """
    chains = [
        chain
        for chain in search.chains
        if not any("ptimizer" in name for name in chain.calls[0].op.ranges)
    ]
    saved = sum(chain.saved_us(search.cost) for chain in chains)
    if len(chains) < COMPILED_CHAINS or saved < COMPILED_SHARE * search.split.step_us:
        return
    moved = sum(chain.bytes_saved for chain in chains)
    yield search.finding(
        "torch.compile",
        f"{len(chains)} chains of operators could be one kernel each, with {byte_count(moved)} "
        "less to move in all",
        "torch.compile(model) fuses them in one go: fuselab explain shows what it makes of them, "
        "and --try times it. fuselab.fuse(model) takes them one by one.",
        None,
        saved,
        float(len(chains)),
        bytes_saved=moved,
    )


def advice_on_a_chain(names: Sequence[str], in_optimizer: bool) -> str:
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


def _is_lookup(span: Span) -> bool:
    """Return whether this is a broadcast equality with a result much larger than either operand."""
    if span.name not in ("aten::eq", "aten::ne") or span.detail is None:
        return False
    largest = max((use.numel for use in span.detail.inputs), default=0)
    made = made_bytes(span)  # one byte per element, since the result is boolean
    return made >= LOOKUP_NUMEL and made >= LOOKUP_GROWTH * largest
