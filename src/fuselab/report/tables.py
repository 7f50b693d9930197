"""Benchmarks as tables of 80 columns; every number has the same digits as in the JSON."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, RenderableType
from rich.console import Group as Lines
from rich.table import Table
from rich.text import Text

from fuselab.measure.verdict import Outcome
from fuselab.prove.bench_against import Against, Change
from fuselab.prove.bench_result import Bench, Comparison, Group, Record
from fuselab.prove.tune import Tried, TunedCase, Tuning
from fuselab.report.numbers import NONE, byte_count, digits, percent_of_limit, rate
from fuselab.report.screen import WIDTH, as_text, folded

NAME_WIDTH = 16
STYLES = {Outcome.FASTER: "green", Outcome.SLOWER: "red", Outcome.UNCLEAR: "yellow"}


def console(color: bool | None = None) -> Console:
    """Return a console of 80 columns on stdout; colours only on a terminal."""
    return Console(width=WIDTH, highlight=False, no_color=color is False, soft_wrap=False)


def bench_text(bench: Bench) -> str:
    """Return what ``fuselab bench`` prints of a benchmark."""
    return as_text(lambda console: console.print(bench_table(bench)))


def bench_table(bench: Bench) -> RenderableType:
    """Return a benchmark's tables, group by group, with what was skipped and the notes."""
    environment = bench.environment
    parts: list[RenderableType] = [
        Text(
            f"{bench.operator} on {environment['device_name']}, torch {environment['torch']}, "
            f"triton {environment['triton']}"
        )
    ]
    for group in bench.groups:
        parts += [Text(), Text(_title(group), style="bold"), _group_table(group)]
        parts += [_paragraph(line) for line in _remarks(group)]
    parts += [_paragraph(f"skipped {line}") for line in bench.skipped]
    parts += [_paragraph(f"note: {line}") for line in bench.notes]
    return Lines(*parts)


def against_table(against: Against) -> RenderableType:
    """Return a table of the rows that changed since an earlier benchmark, the slowest first; the
    others are summed up in one line."""
    parts: list[RenderableType] = [Text(), Text(f"against the earlier run, by {against.by}")]
    parts += [Text(f"  {line}") for line in against.differences]
    moved = [
        change for change in against.changes if change.outcome in (Outcome.SLOWER, Outcome.FASTER)
    ]
    if moved:
        table = _new_table()
        table.add_column("case", width=32)
        table.add_column("provider", width=NAME_WIDTH)
        for heading in ("then", "now"):
            table.add_column(heading, justify="right", min_width=6)
        table.add_column("verdict")
        for change in sorted(moved, key=lambda change: change.speedup):
            table.add_row(
                f"{change.case}, {change.dtype}, {change.phase}",
                change.provider,
                digits(change.before),
                digits(change.after),
                _verdict(change),
            )
        parts.append(table)
    parts.append(Text(_summary(against)))
    return Lines(*parts)


def tuning_table(tuning: Tuning) -> RenderableType:
    """Return every configuration that was tried, the fastest first, and where the choice was
    saved."""
    environment = tuning.environment
    parts: list[RenderableType] = [
        Text(f"{tuning.operator} on {environment['device_name']}, torch {environment['torch']}")
    ]
    for case in tuning.cases:
        parts += [Text(), Text(case.title, style="bold"), _tried_table(case)]
        parts += [
            Text(f"{tried.config} {tried.status.upper()}: {tried.reason}")
            for tried in case.tried
            if tried.status != "ok"
        ]
    parts += [_paragraph(f"skipped {line}") for line in tuning.skipped]
    parts += [_paragraph(f"undecided {line}") for line in tuning.undecided]
    chosen = any(tried.is_chosen for case in tuning.cases for tried in case.tried)
    saved = f"saved in {tuning.file}" if chosen else "nothing to save: no configuration is right"
    return Lines(*parts, Text(), Text(saved))


def _tried_table(case: TunedCase) -> Table:
    table = _new_table()
    table.add_column("configuration", width=31, overflow="fold")
    headings = (("us", 7), ("+-%", 5), ("of def.", 7), ("%lim", 5), ("regs", 4), ("shared", 6))
    for heading, width in headings:
        table.add_column(heading, justify="right", width=width)
    table.add_column("", width=7)
    default = next((tried.median_us for tried in case.tried if tried.is_default), None)
    right = [tried for tried in case.tried if tried.median_us is not None]
    for tried in sorted(right, key=lambda tried: tried.median_us or 0.0):
        assert tried.median_us is not None
        spilled = "!" if tried.local_bytes else ""
        table.add_row(
            Text(str(tried.config), style="bold" if tried.is_chosen else ""),
            _digits(tried.median_us),
            _spread(tried),
            digits(tried.median_us / default) if default else NONE,
            _share(tried),
            NONE if tried.registers is None else f"{tried.registers}{spilled}",
            NONE if tried.shared_bytes is None else f"{tried.shared_bytes}",
            _mark(tried),
        )
    return table


def _mark(tried: Tried) -> str:
    if tried.is_chosen:
        return "kept" if tried.is_default else "chosen"
    return "default" if tried.is_default else ""


def _summary(against: Against) -> str:
    counts = {
        outcome: sum(change.outcome == outcome for change in against.changes) for outcome in Outcome
    }
    text = ", ".join(f"{number} {outcome}" for outcome, number in counts.items() if number)
    unmatched = len(against.unmatched)
    only = f"; {unmatched} only in one of the two" if unmatched else ""
    return f"{text or 'nothing in common to compare'}{only}"


def _paragraph(text: str) -> Text:
    return Text("\n".join(folded("", text)))


def _new_table() -> Table:
    return Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")


def _title(group: Group) -> str:
    parts = [group.title]
    if group.bytes_moved:
        parts.append(f"{byte_count(group.bytes_moved)} moved")
    if group.verdicts_by != "device time":
        parts.append(f"verdicts by {group.verdicts_by}")
    return ", ".join(parts)


def _group_table(group: Group) -> Table:
    compute = group.ceiling is not None and group.ceiling.bound == "compute"
    table = _new_table()
    table.add_column("provider", width=NAME_WIDTH, overflow="fold")
    columns: list[tuple[str, int, Callable[[Record], str]]] = [
        ("us", 7, lambda record: _digits(record.median_us)),
        ("+-%", 5, _spread),
        ("host us", 7, lambda record: _digits(record.host_us)),
        ("TFLOP/s", 7, lambda record: _digits(record.tflops))
        if compute
        else ("GB/s", 7, lambda record: _digits(record.gbps)),
        ("%lim", 5, _share),
    ]
    for heading, width, _ in columns:
        table.add_column(heading, justify="right", width=width, overflow="fold")
    for heading in ("vs eager", "vs peer"):
        table.add_column(heading, width=13, overflow="fold")
    for record in group.records:
        if record.status != "ok":
            continue
        table.add_row(
            Text(record.provider, style="bold" if record.is_ours else ""),
            *(value(record) for _, _, value in columns),
            _comparison(record.vs_eager),
            _comparison(record.vs_best_peer),
        )
    return table


def _digits(value: float | None) -> str:
    """Format a value for a column of 7, without trailing zeros where they do not fit."""
    if value is None:
        return NONE
    text = digits(value)
    return text if len(text) <= 7 else f"{value:g}"


def _spread(record: Record | Tried) -> str:
    """Return half the interval of the median, in per cent of the median."""
    assert record.median_us is not None and record.low_us is not None
    assert record.high_us is not None
    half = 50 * (record.high_us - record.low_us) / record.median_us
    return f"{half:.1f}" if half < 100 else ">99"


def _share(record: Record | Tried) -> str:
    return percent_of_limit(record.ceiling_share)


def _comparison(comparison: Comparison | None) -> Text:
    if comparison is None:
        return Text(NONE)
    return _verdict(comparison)


def _verdict(found: Comparison | Change) -> Text:
    outcome = Outcome(found.outcome)
    speedup = f"{found.speedup:.3f}" if found.speedup < 10 else digits(found.speedup)
    return Text(f"{speedup} {outcome}", style=STYLES.get(outcome, ""))


def _remarks(group: Group) -> list[str]:
    """Return the lines under a table: the ceiling, the best peer, failures, notes, memory,
    energy."""
    lines = []
    ceiling = group.ceiling
    if ceiling is not None:
        speed = f", {rate(ceiling.gbps)}" if ceiling.gbps is not None else ""
        lines.append(f"limit {digits(ceiling.median_us)} us{speed}: {ceiling.kernel}")
    peer = next((r.vs_best_peer.against for r in group.records if r.vs_best_peer), None)
    if peer is not None:
        lines.append(f"best peer: {peer}")
    lines += [
        f"{record.provider} {record.status.upper()}: {record.reason}"
        for record in group.records
        if record.status != "ok"
    ]
    lines += [f"{record.provider}: {record.note}" for record in group.records if record.note]
    explained = [record for record in group.records if record.explain]
    if explained:
        names = ", ".join(record.provider for record in explained)
        lines.append(f"explain {names}: {explained[0].explain}")
    peaks = [record for record in group.records if record.peak_bytes is not None]
    if peaks:
        lines.append(
            "peak above the inputs: "
            + ", ".join(f"{record.provider} {byte_count(record.peak_bytes)}" for record in peaks)
        )
    energy = [record for record in group.records if record.joules is not None]
    if energy:
        lines.append(
            "mJ per call: "
            + ", ".join(f"{record.provider} {digits(1000 * record.joules)}" for record in energy)  # type: ignore[operator]
        )
    return lines
