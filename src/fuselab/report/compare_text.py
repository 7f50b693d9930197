"""Two profiles side by side as text of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fuselab.report.numbers import NONE, byte_count, duration, ratio, share, three
from fuselab.report.screen import cut, folded, table

ROWS = 8
NAME_WIDTH = 34  # what the other columns of a table leave


def compare_text(facts: Mapping[str, Any], name: str) -> str:
    """Return the text of a comparison.

    ``facts`` is the result of ``inspect.compare.compare``, ``name`` the earlier file's name.
    """
    lines = [
        cut(f"Against {name}"),
        *_step(facts),
        *_arguments(facts),
        f" peak memory {byte_count(facts['peak_bytes'][0])} → {byte_count(facts['peak_bytes'][1])}",
    ]
    if facts["busy_share"] != [None, None]:
        lines.append(" busy {} → {}".format(*map(share, facts["busy_share"])))
    rows = [
        [key.removesuffix("_us"), *map(duration, pair), duration(pair[1] - pair[0])]
        for key, pair in facts["split"].items()
    ]
    lines += table(["split", "before", "after", "change"], rows, right=range(1, 4))
    for kind in ("ranges", "operators", "modules", "lines", "kernels"):
        if facts[kind]:
            lines += ["", *_changes(kind.removesuffix("s"), facts[kind][:ROWS])]
    return "\n".join(lines)


def _step(facts: Mapping[str, Any]) -> Iterator[str]:
    """Return the step's two times with the verdict, and what the machine did meanwhile."""
    found, walls = facts["verdict"], facts["wall"]
    if found is None:
        yield " step under the profiler {} → {}".format(*map(duration, facts["step_us"]))
        before, after = facts["device_name"]
        why = (
            f"the two ran on different devices ({before}; {after}): compare the shares"
            if None not in (before, after) and before != after
            else "only one average of a side is known, not rounds of a TARGET"
        )
        yield from folded(" ", f"no verdict: {why}.")
        return
    yield (
        f" step {duration(walls[0]['us'])} → {duration(walls[1]['us'])}: {found['outcome']}, "
        f"{ratio(found['speedup'])} the speed ({ratio(found['low'])} to {ratio(found['high'])})"
    )
    if facts["interleaved"]:
        yield f" {found['rounds']} rounds, both in turn in this run"
        return
    yield " clock {}, load {}".format(
        *(_pair(walls, key) for key in ("clock_mhz", "load")),
    )
    words = (
        f"{found['rounds']} rounds each, at different times: only a difference of more than 5 % "
        "counts. To time both in turn, give the other TARGET: --against before.py."
    )
    yield from folded(" ", words)


def _arguments(facts: Mapping[str, Any]) -> list[str]:
    """Return lines that say so if the two are not called with tensors of the same sizes."""
    before, after = facts["arguments"]
    if before is None or after is None or before == after:
        return []
    then, now = (", ".join(one) or "no tensor" for one in (before, after))
    return folded(" ", f"not the same call: before with {then}; after with {now}")


def _pair(walls: Sequence[Mapping[str, Any]], key: str) -> str:
    values = [wall["machine"][key] for wall in walls]
    unit = " MHz" if key == "clock_mhz" else f" of {walls[1]['machine']['cores']} cores"
    known = [NONE if value is None else three(value) for value in values]
    return " → ".join(known) + unit


def _changes(kind: str, changed: list[Mapping[str, Any]]) -> list[str]:
    rows = [[_name(row), *map(duration, row["us"]), *map(share, row["share"])] for row in changed]
    columns = [kind, "before", "after", "share before", "share after"]
    return table(columns, rows, right=range(1, 5), whole=(0,) if kind == "line" else ())


def _name(row: Mapping[str, Any]) -> str:
    """Return a row's name, with where the line stood before if that was elsewhere."""
    before, name = row.get("before_name"), str(row["name"])
    if before in (None, name) or name == f"{before} (before)":
        return name
    both = f"{before} → {name}"
    return both if len(both) <= NAME_WIDTH else name
