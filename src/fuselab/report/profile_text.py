"""A profile as text of 80 columns, from the same facts as its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from fuselab.report.numbers import NONE, byte_count, count, duration, share
from fuselab.report.screen import bar, cut, folded, table

ROWS = 12  # rows of each table on the screen; the JSON has all
FINDINGS = 10
SHAPES_WIDTH = 14
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
        ("By range", _ranges(facts)),
        ("By operator", _operators(facts)),
        ("By kernel", _kernels(facts)),
        ("By module", _modules(facts)),
        ("By source line", _lines(facts)),
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
    memory = facts["memory"]
    if memory is not None:
        start = memory["start_bytes"]
        yield (
            f" peak memory {byte_count(memory['peak_bytes'])} above the step's start"
            + (f" ({byte_count(start)})" if start is not None else "")
            + f", {byte_count(memory['allocated_bytes'])} allocated"
        )
    if facts["matched"] < 1:
        yield (
            f" lines and shapes are known for {share(facts['matched'])} of the calls: the step "
            "varies, or none was watched"
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
        where = f", {finding['line']}" if finding["line"] else ""
        yield cut(
            f"{number:2}  {duration(finding['saved_us']):>9} {share(finding['share']):>8}  "
            f"{finding['kind']}{where}",
        )
        if finding["source"]:
            yield cut(f"    | {finding['source']}")
        yield from folded("    ", f"{finding['title']}.")
        yield from folded("    → ", finding["advice"])
    if len(findings) > FINDINGS:
        yield f"    and {len(findings) - FINDINGS} smaller ones in --json"


def _on_gpu(facts: Facts) -> bool:
    return bool(facts["device"] == "cuda")


# A column: the row's key, and how its value is written.
Column = tuple[str, Callable[[Any], str]]
_NAME: Column = ("name", str)
_CALLS: Column = ("calls", count)
_SHARE: Column = ("share", share)


def _table(rows: Sequence[Facts], columns: Mapping[str, Column], left: int = 1) -> list[str]:
    """Return the first rows as a table; ``columns`` go by their headings, ``left`` are of text."""
    cells = [[spell(row[key]) for key, spell in columns.values()] for row in rows[:ROWS]]
    return table(list(columns), cells, right=range(left, len(columns)))


def _ranges(facts: Facts) -> list[str]:
    device = {"device": ("device_us", duration)} if _on_gpu(facts) else {}
    wall = {"wall": ("cpu_us", duration)}
    return _table(
        facts["ranges"], {"range": _NAME, "calls": _CALLS, **wall, **device, "share": _SHARE}
    )


def _operators(facts: Facts) -> list[str]:
    inclusive = "device_us" if _on_gpu(facts) else "cpu_us"
    columns: dict[str, Column] = {
        "operator": ("name", lambda name: name.removeprefix(_EVALUATES)),
        "shapes": ("shapes", lambda shapes: cut((shapes or [""])[0], SHAPES_WIDTH)),
        "calls": _CALLS,
        "self": (f"self_{inclusive}", duration),
        "total": (inclusive, duration),
        "memory": ("allocated_bytes", lambda size: byte_count(size or None)),
        "share": _SHARE,
    }
    return _table(facts["operators"], columns, left=2)


def _kernels(facts: Facts) -> list[str]:
    columns: dict[str, Column] = {
        "kernel": ("short_name", str),
        "calls": _CALLS,
        "device": ("device_us", duration),
        "grid": ("grid", _dimensions),
        "block": ("block", _dimensions),
        "share": _SHARE,
    }
    return _table(facts["kernels"], columns)


def _dimensions(sizes: Sequence[int] | None) -> str:
    return "x".join(map(str, sizes)) if sizes else NONE


def _modules(facts: Facts) -> list[str]:
    own: Column = ("share", lambda value: duration(value * facts["step_us"]))
    total: Column = ("total_us", duration)
    return _table(facts["modules"], {"module": _NAME, "self": own, "total": total, "share": _SHARE})


def _lines(facts: Facts) -> list[str]:
    columns: dict[str, Column] = {
        "line": _NAME,
        "": ("text", str),
        "ops": _CALLS,
        "backward": ("backward_us", lambda us: duration(us or None)),
        "all": ("total_us", duration),
        "share": _SHARE,
    }
    return _table(facts["lines"], columns, left=2)


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
