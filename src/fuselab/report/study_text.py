"""A study on the screen: its headline, the ways with their bars, the findings; 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fuselab.report.busy_text import busy_note
from fuselab.report.numbers import duration, ratio, share
from fuselab.report.screen import bar, cut_place, folded, table

Facts = Mapping[str, Any]

WORTH_SHOWING = 0.01  # the least share of a call for a finding to be on the screen
PLACE_WIDTH = 24

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
    what = " speed-up: eager's time over a way's; the verdict compares them round by round"
    busy = busy_note(facts.get("waited_share"))
    return [*table(heading, rows, right=(1, 2, 4)), what, *busy, *notes]


def _leads(facts: Facts) -> Iterator[str]:
    worth = [lead for lead in facts["leads"] if lead["share"] >= WORTH_SHOWING]
    rows = [
        [
            cut_place(lead["line"] or "", PLACE_WIDTH),
            f"{lead['kind']}: {lead['title']}",
            duration(lead["saved_us"]),
            share(lead["share"]),
            _STATES[lead["state"]],
        ]
        for lead in worth[:6]
    ]
    heads = ["line", "finding", "worth", "of a call", "what was done"]
    yield from table(heads, rows, right=(2, 3), whole=(0, 4))
    small = len(facts["leads"]) - len(worth)
    if small:
        yield f" and {small} of less than 1 % of a call, on the page"
    if facts["leads"]:
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
