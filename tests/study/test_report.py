"""The page: one file, nothing from outside, user text as text, every number the JSON's."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest
from sample_study import HOSTILE, sample_study

from fuselab.report import numbers
from fuselab.report.files import json_text
from fuselab.report.html import study_page
from fuselab.report.study_text import study_text
from fuselab.study.conclude import conclude
from fuselab.study.facts import Compiler, Study, Way

VOID = {"meta", "link", "br", "hr", "img", "input"}


class Page(HTMLParser):
    """Tags with their attributes, text outside scripts and styles, and cells with their values."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).replace("\u00a0", " ").split())


def facts_of(study: Study) -> dict[str, Any]:
    """As ``report.json`` has them."""
    return json.loads(json_text({"schema": 1, "verb": "study", **study.describe()}))


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    return facts_of(sample_study())


@pytest.fixture(scope="module")
def page(facts: dict[str, Any]) -> Page:
    return Page(study_page(facts))


def test_every_tag_is_closed_and_the_page_is_whole(page: Page) -> None:
    assert page.open == []
    assert [tag for tag, _ in page.tags].count("h1") == 1


def test_nothing_is_loaded_from_outside(facts: dict[str, Any], page: Page) -> None:
    for tag, attributes in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base")
        for name in ("src", "srcset", "action", "xlink:href"):
            assert name not in attributes
        assert attributes.get("href", "#").startswith(("#", "kernels/"))
        assert not [name for name in attributes if name.startswith("on")]
    text = study_page(facts)
    assert "://" not in text
    assert "@import" not in text
    assert "url(" not in text


def test_the_kernels_that_were_written_are_linked(page: Page) -> None:
    links = [attributes.get("href", "") for tag, attributes in page.tags if tag == "a"]
    assert [link for link in links if not link.startswith("#")] == [
        "kernels/mul_gelu_layer_norm_0a1b2c3d4e/page.md"
    ]


def test_text_from_the_users_code_stays_text(page: Page, facts: dict[str, Any]) -> None:
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert page.text.count(HOSTILE) >= 4  # a source line twice, a break, a module left alone
    hostile = sample_study(f"{HOSTILE}\"'><img src=x onerror=alert(1)>")
    escaped = Page(study_page(facts_of(hostile)))
    assert [tag for tag, _ in escaped.tags] == [tag for tag, _ in page.tags]
    assert "{{ 7 * 7 }}" in Page(study_page(facts_of(sample_study("{{ 7 * 7 }}")))).text
    assert all(tag != "img" for tag, _ in escaped.tags)


def test_hostile_labels_do_not_leave_the_plot() -> None:
    study = sample_study()
    bench = replace(study.benches[0], case=f"</title>{HOSTILE}")
    text = study_page(facts_of(replace(study, benches=(bench,))))
    assert html.escape(f"</title>{HOSTILE}") in text
    assert text.count("<script") == 1


def test_the_first_screen_answers_in_the_jsons_words(page: Page, facts: dict[str, Any]) -> None:
    first = page.text.split("Findings, and what was done")[0]
    for sentence in facts["headline"].values():
        assert sentence in first
    for way in facts["ways"]:
        assert f"{way['title']} {numbers.duration(way['us'])}" in first


def test_a_busy_machine_is_said_beside_the_times(facts: dict[str, Any], page: Page) -> None:
    busy = {**facts, "waited_share": 0.42}
    for text in (" ".join(study_text(busy).split()), Page(study_page(busy)).text):
        assert "the machine is busy: for 42.0 % of the time threads waited" in text
    assert "is busy" not in study_text(facts) and "is busy" not in page.text


def test_page_screen_and_json_agree_to_the_digit(page: Page, facts: dict[str, Any]) -> None:
    screen = " ".join(study_text(facts).split())
    for way in facts["ways"]:
        for text in (page.text, screen):
            assert numbers.duration(way["us"]) in text
            assert numbers.ratio(way["speedup"]) in text
        assert numbers.share(way["limit_share"]) in screen
    for lead in facts["leads"]:
        # the screen leaves out what is worth less than 1 % of a call, and the page folds it away
        for text in (page.text, screen) if lead["share"] >= 0.01 else (page.text,):
            assert numbers.duration(lead["saved_us"]) in text
            assert numbers.share(lead["share"]) in text
    small = [lead for lead in facts["leads"] if lead["share"] < 0.01]
    assert len(small) == 1 and "and 1 of less than 1 % of a call" in screen
    for row in facts["replaced"]:
        assert numbers.duration(row["before_us"]) in page.text
    for record in facts["benches"][0]["records"]:
        assert numbers.duration(record["us"]) in page.text
        assert numbers.rate(record["gbps"]) in page.text


def test_the_memory_of_a_call_is_drawn_by_line(facts: dict[str, Any]) -> None:
    memory = {
        "timeline": [(0.0, 0), (10.0, 400), (20.0, 300)],
        "peak_bytes": 400,
        "layers": [
            {"name": f"m.py:3 {HOSTILE}", "held_bytes": [0, 300, 300]},
            {"name": "other", "held_bytes": [0, 100, 0]},
        ],
    }
    text = study_page({**facts, "profile": {**facts["profile"], "memory": memory}})
    assert text.count("<polygon") == 2 and 'class="layer-rest"' in text
    assert "Memory over one call" in text and "400 B" in text.replace("\u00a0", " ")
    assert text.count("<script") == 1 and html.escape(HOSTILE) in text
    assert "<polygon" not in study_page(facts)


def test_a_kernel_that_is_slower_alone_is_not_shown_as_a_gain(facts: dict[str, Any]) -> None:
    (bench, *rest) = facts["benches"]
    ours = next(record for record in bench["records"] if record["ours"])
    slower = {**ours, "provider": "mine", "speedup": 0.53, "outcome": "SLOWER"}
    untimed = {**ours, "provider": "cuda", "us": None, "reason": "no GPU is here"}
    text = study_page({**facts, "benches": [{**bench, "records": [slower, untimed]}, *rest]})
    assert '<tr class="slower"><td>mine</td>' in text
    assert "<td>cuda</td>" not in text and "Not timed here: cuda (no GPU is here)" in text


def test_four_digits_are_all_that_the_json_holds(facts: dict[str, Any]) -> None:
    def values(fact: Any) -> list[float]:
        if isinstance(fact, dict):
            return [value for item in fact.values() for value in values(item)]
        if isinstance(fact, list):
            return [value for item in fact for value in values(item)]
        return [fact] if isinstance(fact, float) else []

    assert values(facts)
    for value in values(facts["ways"]) + values(facts["profile"]):
        if value not in (way["low_us"] for way in facts["ways"]):
            assert float(numbers.digits(value)) == value


def test_sort_keys_are_the_numbers_shown(page: Page, facts: dict[str, Any]) -> None:
    keys = [attributes["data-value"] for tag, attributes in page.tags if "data-value" in attributes]
    assert str(facts["replaced"][0]["before_us"]) in keys
    assert "None" in keys
    assert all(key == "None" or float(key) is not None for key in keys if key is not None)


def test_what_is_missing_is_said(facts: dict[str, Any]) -> None:
    study = sample_study()
    bare = replace(study, leads=(), replaced=(), left=(), checks=(), benches=(), limit=None)
    page = Page(study_page(facts_of(bare)))
    for sentence in (
        "The profile found nothing worth a line",
        "No chain of this target is one that an operator or a new kernel computes.",
        "No operator was tried, so there was nothing to prove.",
        "No operator was tried, so none was timed alone.",
    ):
        assert sentence in page.text
    assert all(tag != "svg" for tag, _ in page.tags)
    assert study_text(facts_of(bare))


def test_ways_and_compiles_that_fail_give_the_reason() -> None:
    study = sample_study()
    failed = Way("compiled", "torch.compile", reason=f"Unsupported: {HOSTILE}")
    broken = replace(
        study,
        ways=(study.ways[0], study.ways[1], failed, study.ways[3]),
        compiler=Compiler(failed=f"it raised {HOSTILE}"),
    )
    facts = facts_of(replace(broken, headline=conclude(broken)))
    page = Page(study_page(facts))
    assert f"torch.compile does not take this target: it raised {HOSTILE}" in page.text
    assert f"torch.compile Unsupported: {HOSTILE}" in page.text
    assert "torch.compile: Unsupported" in study_text(facts)
    assert facts["headline"]["compile"].startswith("No: it does not run this target (Unsupported")


def test_the_screen_has_80_columns(facts: dict[str, Any]) -> None:
    lines = study_text(facts).splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(
        r"torch\.compile of fused +19\.0 ms +2\.17× +FASTER +68\.7 %", "\n".join(lines)
    )
    assert re.search(r"dlrm\.py:116 +chain: 3 operators could ", "\n".join(lines))
