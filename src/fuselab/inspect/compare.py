"""Two profiles side by side: shares of operators, ranges and modules, memory, busy share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Facts = Mapping[str, Any]
TABLES = ("ranges", "operators", "modules", "kernels")


def compare(before: Facts, after: Facts) -> dict[str, Any]:
    """Return the figures of ``before`` and ``after`` in pairs; a name missing on one side has None.

    Rows are ordered by how many microseconds per step they changed.
    """
    return {
        "step_us": [before["step_us"], after["step_us"]],
        "split": {key: [before["split"][key], after["split"][key]] for key in after["split"]},
        "peak_bytes": [_peak(before), _peak(after)],
        "busy_share": [before["busy_share"], after["busy_share"]],
        "device": [before["device"], after["device"]],
        **{name: _rows(before, after, name) for name in TABLES},
    }


def _peak(facts: Facts) -> int | None:
    return facts["memory"]["peak_bytes"] if facts["memory"] else None


def _rows(before: Facts, after: Facts, table: str) -> list[dict[str, Any]]:
    sides = []
    for facts in (before, after):
        shares: dict[str, float] = {}
        for row in facts[table]:  # kernels of one name differ by launch size
            shares[row["name"]] = shares.get(row["name"], 0.0) + row["share"]
        sides.append(shares)
    old, new = sides
    rows = [
        {
            "name": name,
            "share": [old.get(name), new.get(name)],
            "us": [
                old[name] * before["step_us"] if name in old else None,
                new[name] * after["step_us"] if name in new else None,
            ],
        }
        for name in dict.fromkeys([*old, *new])
    ]
    return sorted(rows, key=lambda row: -abs((row["us"][1] or 0.0) - (row["us"][0] or 0.0)))
