"""A profile as text of 80 columns, from the same facts as its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fuselab.report.busy_text import busy_note
from fuselab.report.numbers import NONE, byte_count, count, duration, ratio, share
from fuselab.report.screen import WIDTH, bar, cut, cut_place, folded, table

ROWS = 12  # rows of each table on the screen; the JSON has all
FINDINGS = 10
SHAPES_WIDTH = 12
PLACE_WIDTH = 26  # the longest name of a source line in a table
HOLDERS = 6  # lines and modules that hold memory
TREE_LINES = 24
TREE_SHARE = 0.01  # the least share of the step for a call to appear in the tree

_SPLIT = {
    "compute": "matrix products, convolutions",
    "memory": {
        "cuda": "other kernels, copies within the device",
        "cpu": "other operators of 32 KiB and more",
    },
    "overhead": {
        "cuda": "the device waits for the host",
        "cpu": "Python, dispatch, small operators",
    },
    "data": "copies between host and device, loader",
}

Facts = Mapping[str, Any]
_EVALUATES = "autograd::engine::evaluate_function: "


def profile_text(facts: Facts) -> str:
    """Return the text that ``fuselab profile`` prints."""
    lines = [*_head(facts), "", *_split(facts), "", *_findings(facts)]
    for title, rows in (
        ("Tried in turn", _tried(facts)),
        ("By range", _ranges(facts)),
        ("By operator", _operators(facts)),
        ("By kernel", _kernels(facts)),
        ("By module", _modules(facts)),
        ("By source line", _lines(facts)),
        ("Memory by source line", _holders(facts, "lines")),
        ("Memory by module", _holders(facts, "modules")),
        ("Call tree", _tree(facts)),
    ):
        if rows:
            lines += ["", title, *rows]
    return "\n".join(lines)


def _head(facts: Facts) -> Iterator[str]:
    steps = facts["steps"]
    yield cut(
        f"{facts['name']} on {facts['device']}: {duration(facts['step_us'])} per step, "
        f"average of {steps} step{'s' if steps != 1 else ''}"
    )
    wall = facts.get("wall")
    if wall is not None:
        yield (
            f" without the profiler {duration(wall['us'])}, 95 % within "
            f"{duration(wall['low_us'])} to {duration(wall['high_us'])}, "
            f"{len(wall['rounds_us'])} rounds"
        )
    machine = (wall or {}).get("machine") or {}
    yield from busy_note(facts.get("waited_share"), machine.get("waited_share"))
    if facts["within"] is not None:
        yield cut(f" findings and tables: only what runs within the range {facts['within']}")
    memory = facts["memory"]
    if memory is not None:
        start = memory["start_bytes"]
        yield (
            f" peak memory {byte_count(memory['peak_bytes'])} above the step's start"
            + (f" ({byte_count(start)})" if start is not None else "")
            + f", {byte_count(memory['allocated_bytes'])} allocated"
        )
    if facts["matched"] < 1:
        yield from folded(
            " ",
            f"lines and shapes are known for {share(facts['matched'])} of the calls: "
            + (
                "the trace was recorded without with_stack=True or record_shapes=True"
                if "trace" in facts
                else "the step varies, or none was watched"
            ),
        )
    if facts["busy_share"] is not None:
        yield f" the GPU is busy {share(facts['busy_share'])} of the time"


def _split(facts: Facts) -> Iterator[str]:
    for kind, meaning in _SPLIT.items():
        us = facts["split"][f"{kind}_us"]
        part = us / facts["step_us"] if facts["step_us"] else 0.0
        words = meaning[facts["device"]] if isinstance(meaning, dict) else meaning
        yield (f" {kind:9}{duration(us):>9} {share(part):>9} {bar(part, 10):10} {words}".rstrip())


def _findings(facts: Facts) -> Iterator[str]:
    findings = facts["findings"]
    if not findings:
        yield "No findings worth 0.2 % of the step."
        return
    yield "Findings, by the time they would save"
    for number, finding in enumerate(findings[:FINDINGS], 1):
        head = (
            f"{number:2}  {duration(finding['saved_us']):>9} {share(finding['share']):>8}  "
            f"{finding['kind']}"
        )
        place = cut_place(finding["line"], WIDTH - len(head) - 2) if finding["line"] else ""
        yield f"{head}, {place}" if place else head
        if finding["source"]:
            yield cut(f"    | {finding['source']}")
        yield from folded("    ", f"{finding['title'].removesuffix('.')}.")
        yield from folded("    → ", finding["advice"])
    if len(findings) > FINDINGS:
        more = len(findings) - FINDINGS
        yield f"    and {more} smaller one{'s' if more > 1 else ''} in --json"


def _tried(facts: Facts) -> list[str]:
    """Return the levers that were tried, with what each does to the outputs."""
    tried = facts.get("tried") or []
    rows = [
        [
            f"{row['name']} ({row['note']})" if row["note"] else row["name"],
            duration(row["us"]),
            ratio(row["speedup"]) if row["outcome"] else "",
            row["outcome"] or "",
            _difference(row),
        ]
        for row in tried
        if row["us"] is not None
    ]
    lines = table(["lever", "step", "speed-up", "verdict", "change"], rows, right=(1, 2))
    for row in tried:
        if row["reason"] is not None:
            lines += folded("  ", f"{row['name']} does not run: {row['reason']}", indent=4)
    if any(row["difference"] for row in tried):
        lines += folded(" ", "change: of the outputs; the norm of the difference over their norm")
    return lines


def _difference(row: Facts) -> str:
    if row["outcome"] is None:
        return ""
    if row["difference"] is None:
        return NONE
    return "nothing" if row["difference"] == 0 else f"{row['difference']:.1e}"


def _on_gpu(facts: Facts) -> bool:
    return bool(facts["device"] == "cuda")


# A column: the row's key, and how its value is written.
Column = tuple[str, Callable[[Any], str]]
_NAME: Column = ("name", str)
_CALLS: Column = ("calls", count)
_SHARE: Column = ("share", share)


def _table(
    rows: Sequence[Facts], columns: Mapping[str, Column], left: int = 1, whole: Sequence[int] = ()
) -> list[str]:
    """Return the first rows as a table; ``columns`` go by their headings, ``left`` are of text."""
    cells = [[spell(row[key]) for key, spell in columns.values()] for row in rows[:ROWS]]
    return table(list(columns), cells, right=range(left, len(columns)), whole=whole)


def _each(rows: Sequence[Facts], key: str) -> list[dict[str, Any]]:
    """Return the rows with the average of ``key`` per call, as ``each``."""
    return [{**row, "each": row[key] / row["calls"] if row["calls"] else None} for row in rows]


_EACH: Column = ("each", duration)


def _ranges(facts: Facts) -> list[str]:
    device = {"device": ("device_us", duration)} if _on_gpu(facts) else {}
    wall = {"wall": ("cpu_us", duration), "each": _EACH}
    rows = _each(facts["ranges"], "cpu_us")
    return _table(rows, {"range": _NAME, "calls": _CALLS, **wall, **device, "share": _SHARE})


def _operators(facts: Facts) -> list[str]:
    inclusive = "device_us" if _on_gpu(facts) else "cpu_us"
    columns: dict[str, Column] = {
        "operator": ("name", lambda name: name.removeprefix(_EVALUATES).removeprefix("aten::")),
        "shapes": ("shapes", lambda shapes: cut((shapes or [""])[0], SHAPES_WIDTH)),
        "calls": _CALLS,
        "self": (f"self_{inclusive}", duration),
        "total": (inclusive, duration),
        "each": _EACH,
        "memory": ("allocated_bytes", lambda size: byte_count(size or None)),
        "share": _SHARE,
    }
    return _table(_each(facts["operators"], inclusive), columns, left=2)


def _kernels(facts: Facts) -> list[str]:
    columns: dict[str, Column] = {
        "kernel": ("short_name", str),
        "calls": _CALLS,
        "device": ("device_us", duration),
        "each": _EACH,
        "grid": ("grid", _dimensions),
        "block": ("block", _dimensions),
        "share": _SHARE,
    }
    return _table(_each(facts["kernels"], "device_us"), columns)


def _dimensions(sizes: Sequence[int] | None) -> str:
    return "x".join(map(str, sizes)) if sizes else NONE


def _modules(facts: Facts) -> list[str]:
    own: Column = ("device_us" if _on_gpu(facts) else "cpu_us", duration)
    total: Column = ("total_us", duration)
    return _table(facts["modules"], {"module": _NAME, "self": own, "total": total, "share": _SHARE})


def _lines(facts: Facts) -> list[str]:
    columns: dict[str, Column] = {
        "line": ("name", lambda name: cut_place(name, PLACE_WIDTH)),
        "": ("text", str),
        "ops": _CALLS,
        "backward": ("backward_us", lambda us: duration(us or None)),
        "all": ("total_us", duration),
        "share": _SHARE,
    }
    return _table(facts["lines"], columns, left=2, whole=(0,))


def _holders(facts: Facts, by: str) -> list[str]:
    """Return who allocates most, and how much of the peak each holds."""
    memory = facts["memory"]
    if memory is None:
        return []
    peak = memory["peak_bytes"]
    columns: dict[str, Column] = {
        by.removesuffix("s"): ("name", lambda name: cut_place(name, PLACE_WIDTH + 9)),
        "": ("text", str),
        "allocations": _CALLS,
        "allocated": ("allocated_bytes", byte_count),
        "at the peak": ("at_peak_bytes", lambda size: byte_count(size or None)),
        "of peak": ("at_peak_bytes", lambda size: share(size / peak if peak and size else None)),
    }
    if by == "modules":
        columns.pop("")
    left = len(columns) - 4
    return _table(memory[by][:HOLDERS], columns, left=left, whole=(0,))


def _tree(facts: Facts) -> list[str]:
    """Return the most expensive calls as a tree; times are the device's on a GPU, else the
    host's."""
    key = "device_us" if _on_gpu(facts) else "cpu_us"
    found: list[str] = []

    def show(nodes: Sequence[Facts], depth: int) -> None:
        for node in nodes:
            if node[key] < TREE_SHARE * facts["step_us"] or len(found) >= TREE_LINES:
                continue
            calls = f" x {count(node['calls'])}" if node["calls"] != 1 else ""
            name = cut(" " * (1 + 2 * depth) + node["name"] + calls, 66)
            found.append(f"{name:66} {duration(node[key]):>12}")
            for kernel in node["kernels"]:
                launch = "x".join(map(str, kernel["grid"] or ())) or "-"
                block = "x".join(map(str, kernel["block"] or ())) or "-"
                text = " " * (3 + 2 * depth) + f"▸ {kernel['short_name']} <<<{launch}, {block}>>>"
                found.append(f"{cut(text, 66):66} {duration(kernel['device_us']):>12}")
            show(node["children"], depth + 1)

    show(facts["tree"], 0)
    return found
