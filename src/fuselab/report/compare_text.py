"""Two profiles side by side as text of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselab.report.numbers import byte_count, duration, ratio, share
from fuselab.report.screen import cut, table

ROWS = 8


def compare_text(facts: Mapping[str, Any], name: str) -> str:
    """Return the text of a comparison.

    ``facts`` is the result of ``inspect.compare.compare``, ``name`` the earlier file's name.
    """
    old, new = facts["step_us"]
    lines = [
        cut(f"Against {name}"),
        f" step {duration(old)} → {duration(new)}: {ratio(old / new)} the speed",
        f" peak memory {byte_count(facts['peak_bytes'][0])} → {byte_count(facts['peak_bytes'][1])}",
    ]
    if facts["busy_share"] != [None, None]:
        lines.append(" busy {} → {}".format(*map(share, facts["busy_share"])))
    rows = [
        [key.removesuffix("_us"), *map(duration, pair), duration(pair[1] - pair[0])]
        for key, pair in facts["split"].items()
    ]
    lines += table(["split", "before", "after", "change"], rows, right=range(1, 4))
    for kind in ("ranges", "operators", "modules", "kernels"):
        if facts[kind]:
            lines += ["", *_changes(kind.removesuffix("s"), facts[kind][:ROWS])]
    return "\n".join(lines)


def _changes(kind: str, changed: list[Mapping[str, Any]]) -> list[str]:
    rows = [[row["name"], *map(duration, row["us"]), *map(share, row["share"])] for row in changed]
    columns = [kind, "before", "after", "share before", "share after"]
    return table(columns, rows, right=range(1, 5))
