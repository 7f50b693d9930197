"""The screen of a sharding plan: where each table is, and what each rank holds and moves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fuselab.report.numbers import byte_count
from fuselab.report.screen import table


def plan_text(facts: Mapping[str, Any]) -> str:
    """Return the two tables for the facts of ``fuselab.distributed.planner.facts``."""
    placed = [
        [
            str(place),
            f"{each['rows']:,}",
            str(each["columns"]),
            byte_count(each["rows"] * each["columns"] * 4),
            each["kind"],
            _ranks(each["ranks"], facts["ranks"]),
        ]
        for place, each in enumerate(facts["tables"])
    ]
    moved = [
        [
            str(rank),
            *(byte_count(each[key]) for key in ("held", "sent", "received", "reduced")),
            byte_count(each["memory_moved"]),
            f"{each['seconds'] * 1e6:,.0f}",
        ]
        for rank, each in enumerate(facts["loads"])
    ]
    first = table(
        ["table", "rows", "wide", "bytes", "placed by", "on ranks"], placed, right=(0, 1, 2, 3)
    )
    second = table(
        ["rank", "holds", "sends", "receives", "reduces", "in memory", "us"],
        moved,
        right=range(7),
    )
    return "\n".join(
        [*first, "", "per step, forward and backward; us: without any overlap", *second]
    )


def _ranks(ranks: Sequence[int], count: int) -> str:
    if not ranks:
        return "all"
    if len(ranks) == count and count > 4:
        return f"0 to {count - 1}"
    return ", ".join(map(str, ranks))
