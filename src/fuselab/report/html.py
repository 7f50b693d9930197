"""A study's JSON as one page that opens offline, with styles, script and plots inside it.

The page is a pure function of the JSON. Every value goes through jinja2's escaping, so that text
from the user's code stays text. Only the output of ``charts`` is not escaped again, because
``charts`` escapes its own values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from fuselab.errors import MissingDependencyError
from fuselab.report import numbers
from fuselab.report.busy_text import busy_sentence
from fuselab.report.charts import Point, memory_chart, roofline

try:
    import jinja2
except ImportError as error:
    raise MissingDependencyError.of_extra("report.html needs", "jinja2", "report") from error

_PAGES = jinja2.Environment(
    loader=jinja2.PackageLoader("fuselab.report", "templates"),
    autoescape=True,
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)


def _unbroken(text: str) -> str:
    """Replace the space between a number and its unit by a no-break space."""
    return re.sub(r"(?<=\d) (?=[^\W\d]|%)", "\u00a0", text)


def _filter(spell: Callable[[Any], str]) -> Callable[[Any], str]:
    return lambda value: _unbroken(spell(value))


_SPELLINGS = ("duration", "share", "ratio", "byte_count", "rate", "tflops", "ulp", "count")
_PAGES.filters |= {name: _filter(getattr(numbers, name)) for name in _SPELLINGS}
_PAGES.filters["unbroken"] = _unbroken


def study_page(facts: Mapping[str, Any]) -> str:
    """Return the page of a study's JSON, as HTML text."""
    return _PAGES.get_template("study.html.jinja").render(
        study=facts,
        roofline=_roofline(facts),
        memory=memory_chart(facts["profile"].get("memory")),
        busy=busy_sentence(facts.get("waited_share")),
    )


def _roofline(facts: Mapping[str, Any]) -> str:
    """Draw the whole model each way, and every operator at the sizes found in it."""
    limit = facts["limit"]
    if limit is None:
        return ""
    return roofline(
        [*_model_points(facts), *_operator_points(facts)], limit["gbps"], limit["tflops"] * 1e3
    )


def _model_points(facts: Mapping[str, Any]) -> Iterator[Point]:
    limit = facts["limit"]
    for way in facts["ways"]:
        if way["us"] is not None:
            yield Point(
                f"whole model, {way['title']}",
                "ours" if "fused" in way["name"] else "theirs",
                limit["flops"] / limit["bytes"],
                limit["flops"] / way["us"] / 1e3,
                tag="whole model" if way["name"] == "eager" else "",
            )


def _operator_points(facts: Mapping[str, Any]) -> Iterator[Point]:
    for bench in facts["benches"]:
        for record in bench["records"]:
            if bench["bytes"] and bench["flops"] and record["us"] is not None:
                yield Point(
                    f"{bench['operator']} {bench['case']}, {record['provider']}",
                    "ours" if record["ours"] else "theirs",
                    bench["flops"] / bench["bytes"],
                    bench["flops"] / record["us"] / 1e3,
                )
