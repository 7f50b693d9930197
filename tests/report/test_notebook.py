"""Results in a notebook: each shows the screen of its verb."""

from __future__ import annotations

import html
import re

import torch

import fuselab
from fuselab.notebook import ShownInNotebooks
from fuselab.ops import contract


def shown(result: ShownInNotebooks) -> str:
    """Return the text of the cell."""
    cell = result._repr_html_()
    match = re.fullmatch(r"<pre style=\"[^\"]*\">(.*)</pre>", cell, flags=re.S)
    assert match is not None, cell
    return html.unescape(match.group(1))


def test_a_check_shows_its_table_and_its_verdict() -> None:
    report = fuselab.check(
        "add_mul_activation", "cpp", torch.float32, case="cases@boundary_1x1", device="cpu"
    )
    lines = shown(report).splitlines()
    assert lines[0].startswith("fuselab::add_mul_activation")
    assert lines[-1].startswith("PASS")
    assert any("cpp" in line and "float32" in line for line in lines)
    assert max(map(len, lines)) <= 80


def test_a_benchmark_shows_its_table() -> None:
    result = fuselab.bench(
        contract("add_mul_activation"),
        providers=["eager"],
        cases=["4x4"],
        dtypes=[torch.float32],
        budget_s=0.01,
        device="cpu",
    )
    lines = shown(result).splitlines()
    assert lines[0].startswith("fuselab::add_mul_activation on ")
    assert any(line.lstrip().startswith("eager") for line in lines)


def test_a_timing_shows_its_sentence() -> None:
    timing = fuselab.time(torch.add, torch.ones(4), torch.ones(4), budget_s=0.01)
    assert shown(timing) == str(timing) and " us (" in str(timing)


def test_characters_of_html_are_escaped() -> None:
    class Result(ShownInNotebooks):
        def __str__(self) -> str:
            return "a < b & c"

    assert "a &lt; b &amp; c" in Result()._repr_html_()
