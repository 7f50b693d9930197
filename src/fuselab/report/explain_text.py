"""The facts of ``fuselab explain`` as text of 80 columns, from the same facts as the JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fuselab.report.busy_text import busy_note
from fuselab.report.numbers import NONE, byte_count, count, duration, rate, ratio, share
from fuselab.report.screen import cut, folded, table

ROWS = 30  # kernels on the screen; the JSON has all

Facts = Mapping[str, Any]


def explain_text(facts: Facts) -> str:
    """Return the text that ``fuselab explain`` prints."""
    timed = "compiled" in facts  # not for a GPU that is not there
    lines = [*_head(facts), *(["", *_speed(facts)] if timed else []), "", *_graphs(facts)]
    if facts.get("modes"):
        lines += ["", *_modes(facts)]
    if facts["dynamic"]:
        lines += ["", *_batches(facts)]
    lines += ["", *_kernels(facts)]
    return "\n".join(lines)


def _head(facts: Facts) -> Iterator[str]:
    passes = "forward and backward" if facts["backward"] else "forward"
    mode = "" if facts["mode"] == "default" else f", mode {facts['mode']}"
    yield cut(f"{facts['name']} on {facts['device']}, {passes}, torch.compile{mode}")
    if "chip" in facts:
        yield from folded(
            " ",
            f"written for an {facts['chip']} that is not here: nothing was compiled or timed. An "
            "operator that has another form on a GPU, as attention has, appears in the CPU's.",
        )


def _speed(facts: Facts) -> Iterator[str]:
    rows = [
        [
            name,
            duration(facts[name]["us"]),
            f"{duration(facts[name]['low_us'])} to {duration(facts[name]['high_us'])}",
            byte_count(facts[name]["peak_bytes"]),
            share(facts[name]["busy_share"]),
        ]
        for name in ("eager", "compiled")
    ]
    columns = ["one step", "median", "95 % interval", "peak memory", "GPU busy"]
    if facts["device"] == "cpu":
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    yield from table(columns, rows, right=range(1, len(columns)))
    # the median of the rounds' ratios, which is not the ratio of the two medians
    yield f" round by round, compiled is {ratio(facts['speedup'])} as fast: {facts['verdict']}"
    yield from busy_note(facts.get("waited_share"))
    compiled = facts["compile"]
    yield from folded(
        " ",
        f"compile: {_seconds(compiled['cold_s'])} with empty caches "
        f"(Inductor {_seconds(compiled['backend_s'])}), "
        f"{_seconds(compiled['warm_s'])} from the cache on disk",
    )


def _seconds(seconds: float) -> str:
    return duration(seconds * 1e6)


def _graphs(facts: Facts) -> Iterator[str]:
    graphs, breaks = facts["graphs"], facts["breaks"]
    yield (
        f"{count(graphs)} graph{'s' if graphs != 1 else ''}, {count(len(breaks))} graph "
        f"break{'s' if len(breaks) != 1 else ''}, {count(facts['guards'])} guards"
    )
    for found in breaks:
        if "line" in found:
            yield cut(f"  {found['line']} | {found['source']}")
        yield from folded("    ", found["reason"])
    for failure in facts["failures"]:
        yield from folded("  not compiled: ", failure)


def _modes(facts: Facts) -> Iterator[str]:
    yield "Modes side by side"
    columns = ["mode", "first call", "one step", "vs eager", "peak memory", "fused", "calls"]
    rows = [
        [
            row["mode"],
            _seconds(row["cold_s"]),
            duration(row["us"]),
            ratio(row["speedup"]),
            byte_count(row["peak_bytes"]),
            str(row["fused"]),
            str(row["library_calls"]),
        ]
        for row in facts["modes"]
    ]
    yield from table(columns, rows, right=range(1, len(columns)))


def _batches(facts: Facts) -> Iterator[str]:
    ways = facts["batches"]
    yield "Batch sizes, one after the other: the first call, and a step after it"
    columns = ["rows", "eager"]
    for name in ways:
        columns += [name, "then"]
    rows = []
    for place, row in enumerate(next(iter(ways.values()))["rows"]):
        cells = [str(row["batch"]), duration(row["eager_us"])]
        for way in ways.values():
            own = way["rows"][place]
            cells += [_seconds(own["first_call_s"]), duration(own["us"])]
        rows.append(cells)
    yield from table(columns, rows, right=range(len(columns)))
    for name, way in ways.items():
        count_of = sum(row["compiled"] for row in way["rows"])
        spent = sum(row["first_call_s"] for row in way["rows"] if row["compiled"])
        yield f" {name}: {count(count_of)} compiled in {_seconds(spent)}"
        for row in way["rows"]:
            for reason in row["reasons"]:
                rows_of = "row" if row["batch"] == 1 else "rows"
                yield from folded("   ", f"{row['batch']} {rows_of}: {reason}")
        for one in way["constant"]:
            at = f" by {one['line']} | {one['source']}" if "line" in one else ""
            yield from folded("   ", f"{one['size']} is fixed to {one['value']}{at}")


def _kernels(facts: Facts) -> Iterator[str]:
    kernels = facts["kernels"]
    fused = sum(row["kind"] == "fused" for row in kernels)
    calls = len(kernels) - fused
    plural = "" if calls == 1 else "s"
    yield f"Kernels in launch order: {fused} fused, {calls} library call{plural}"
    if not kernels:
        return
    rows = []
    timed = "compiled" in facts
    for number, row in enumerate(kernels[:ROWS], 1):
        times = [duration(row["us"]), rate(row["gbps"]), share(row["share"])] if timed else []
        rows.append([str(number), row["name"], byte_count(row["bytes"]), *times])
    heads = ["time", "rate", "of ceiling"] if timed else []
    columns = ["", "kernel", "must move", *heads]
    yield from table(columns, rows, right=(0, *range(2, len(columns))))
    if facts["ceiling"]:
        words = f"ceiling: {facts['ceiling']}; over 100 % a cache still held the inputs."
        yield from folded(" ", words)
    if len(kernels) > ROWS:
        yield f" and {len(kernels) - ROWS} more in --json"
    yield ""
    yield "What each fuses"
    phase = None
    for number, row in enumerate(kernels[:ROWS], 1):
        if (row["graph"], row["phase"]) != phase:
            phase = (row["graph"], row["phase"])
            yield f" graph {row['graph']}, {row['phase']}"
        operators = ", ".join(name.removeprefix("aten.") for name in row["operators"]) or NONE
        lines = ", ".join(line["line"] for line in row["lines"]) or NONE
        yield from folded(f"{number:4}  ", f"{operators}  [{lines}]")
