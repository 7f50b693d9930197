"""A study on the screen: its headline, the ways with their bars, the findings; 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from fuselab.report.numbers import duration, ratio, share
from fuselab.report.text_table import WIDTH, bar, cut, table

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
    yield from textwrap.wrap(headline["sentence"], WIDTH)
    yield ""
    for question, answer in (
        ("was slow", headline["slow"]),
        ("changed", headline["changed"]),
        ("limit", headline["limit"]),
        ("compile", headline["compile"]),
    ):
        yield from textwrap.wrap(
            answer, WIDTH, initial_indent=f" {question:<10}", subsequent_indent=" " * 11
        )


def _ways(facts: Facts) -> list[str]:
    longest = max(way["us"] for way in facts["ways"] if way["us"] is not None)
    rows = []
    notes = []
    for way in facts["ways"]:
        if way["us"] is None:
            notes += textwrap.wrap(
                f"{way['title']}: {way['reason']}",
                WIDTH,
                initial_indent=" ",
                subsequent_indent="   ",
            )
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
        yield from textwrap.wrap(
            f"FAIL {row['operator']} {row['implementation']} {row['dtype']}: {row['reason']}", WIDTH
        )
    if facts["checks"] and not failed:
        trials = sum(row["trials"] for row in facts["checks"])
        yield f"The operators tried pass their checks ({trials} trials)."
