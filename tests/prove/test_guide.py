"""Each failure says which part of the guide is about it, and the guide has that part."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gallery import wrong

from fuselab.prove import check_group, guide
from fuselab.prove.check import check
from fuselab.prove.result import CheckReport, Group, Result, Verdict, group_facts
from fuselab.report import check_text

ROOT = Path(__file__).parents[2]
# Results that no entry of CHECKS makes.
OTHERS = ("whole", "huge", "import", "build", "run", "interpreter")


@pytest.mark.parametrize("name", [*(known.name for known in check_group.CHECKS), *OTHERS])
def test_every_check_has_a_part_of_the_guide(name: str) -> None:
    headings = [
        line.removeprefix("### ")
        for line in (ROOT / guide.PAGE).read_text().splitlines()
        if line.startswith("### ")
    ]
    failure = Result(name, Verdict.FAIL, "wrong")
    assert guide.section_of(name) in headings
    assert failure.guide == f'{guide.PAGE}, "{guide.section_of(name)}"'
    assert Result(name, Verdict.PASS).guide is None


def test_a_failure_says_what_was_expected_and_how_to_mend_it() -> None:
    op = wrong.half_precision_inside("cpu")
    report = check(op, dtype=torch.float32, quick=True, device="cpu", case="cases@16x64")
    (failure,) = report.groups[0].failures
    words = str(failure.reason).split()
    error = float(words[words.index("by") + 1])
    allowed = float(words[words.index("and") + 1])
    assert allowed < error and abs(error / allowed / failure.share_of_bar - 1) < 0.01
    (entry,) = group_facts(report.groups[0])["results"]
    assert entry["guide"] == 'docs/check.md, "A value misses the bar"'
    assert f"How to mend it: {entry['guide']}" in check_text.check_text(report)


def test_thousands_of_ulp_beside_a_pass_are_explained() -> None:
    results = tuple(
        Result("values", Verdict.PASS, trials=8, ours_ulp=ulp, eager_ulp=ulp, share_of_bar=0.2)
        for ulp in (3.0, 6.88e34)
    )
    for result, notes in zip(results, (0, 1), strict=True):
        group = Group("cpp", "bfloat16", "cpu", (result,))
        report = CheckReport("fuselab::softmax", 1, True, "cpu", (group,))
        said = [line for line in check_text.notes(report) if "thousands of ulp" in line]
        assert len(said) == notes
