"""A study on the screen: its headline, the ways with their bars, the findings; 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fuselab.report.numbers import duration, ratio, share
from fuselab.report.screen import bar, cut, folded, table

Facts = Mapping[str, Any]

_STATES = {
    "replaced": "replaced",
    "compiled": "torch.compile",
    "tried": "tried, not kept",
    "open": "left open",
}


def study_text(facts: Facts) -> str:
    """Return the screen's text from a study's JSON."""
    return "\n".join([*_headline(facts), "", *_ways(facts), "", *_leads(facts), *_proof(facts)])


def _headline(facts: Facts) -> Iterator[str]:
    headline = facts["headline"]
    yield from folded("", headline["sentence"])
    yield ""
    for question, answer in (
        ("was slow", headline["slow"]),
        ("changed", headline["changed"]),
        ("limit", headline["limit"]),
        ("compile", headline["compile"]),
    ):
        yield from folded(f" {question:<10}", answer)


def _ways(facts: Facts) -> list[str]:
    longest = max(way["us"] for way in facts["ways"] if way["us"] is not None)
    rows = []
    notes = []
    for way in facts["ways"]:
        if way["us"] is None:
            notes += folded(" ", f"{way['title']}: {way['reason']}", indent=3)
            continue
        rows.append(
            [
                way["title"],
                duration(way["us"]),
                ratio(way["speedup"]),
                way["outcome"] or "",
                share(way["limit_share"]),
                bar(way["us"] / longest, 16),
            ]
        )
    heading = [facts["subject"]["phase"], "time", "speed-up", "verdict", "of limit", ""]
    what = " speed-up: median of eager's time over a way's, round by round"
    return [*table(heading, rows, right=(1, 2, 4)), what, *notes]


def _leads(facts: Facts) -> Iterator[str]:
    if not facts["leads"]:
        return
    rows = [
        [
            cut(f"{lead['title']}" + (f", {lead['line']}" if lead["line"] else ""), 46),
            duration(lead["saved_us"]),
            share(lead["share"]),
            _STATES[lead["state"]],
        ]
        for lead in facts["leads"][:6]
    ]
    yield from table(["finding", "worth", "of a call", "what was done"], rows, right=(1, 2))
    yield ""


def _proof(facts: Facts) -> Iterator[str]:
    failed = [row for row in facts["checks"] if row["verdict"] == "FAIL"]
    for row in failed:
        yield from folded(
            "FAIL ",
            f"{row['operator']} {row['implementation']} {row['dtype']}: {row['reason']}",
            indent=0,
        )
    if facts["checks"] and not failed:
        trials = sum(row["trials"] for row in facts["checks"])
        yield f"The operators tried pass their checks ({trials} trials)."
