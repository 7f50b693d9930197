"""Checks in processes of their own: the same rows as in one process; a process that dies fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from gallery import honest

from fuselab.prove import check_group
from fuselab.prove.check_group import run_group
from fuselab.prove.check_processes import groups_in_processes
from fuselab.prove.load import load_op
from fuselab.prove.result import Group, Verdict
from fuselab.prove.subject import Subject

DIES = """
def forward(input, bias, scale):
    import os, sys
    print("the kernel's last words", file=sys.stderr, flush=True)
    os._exit(7)

def make_op(name, _make=make_op):
    return _make(name, forward=forward)
"""


def subject_of(folder: Path, name: str, change: str = "") -> Subject:
    path = folder / f"{name}.py"
    path.write_text(Path(honest.__file__).read_text() + f"\n{change}\nOP = make_op('{name}')\n")
    spec = str(path)
    return Subject(
        load_op(spec), "plain", torch.device("cpu"), torch.float16, seed=2, quick=True, spec=spec
    )


def test_a_row_is_the_same_in_a_process_of_its_own(tmp_path: Path) -> None:
    first = replace(subject_of(tmp_path, "process_honest"), budget_s=0.0)  # the fewest trials
    second = replace(first, first=False)  # skips what --quick makes in one dtype only
    found = groups_in_processes([first, second])

    def figures(group: Group) -> list[object]:
        return [(entry.check, entry.verdict, entry.share_of_bar) for entry in group.results]

    assert [figures(group) for group in found] == [
        figures(run_group(first, None)),
        figures(run_group(second, None)),
    ]
    assert found[0].share_of_bar > 0 and found[0].verdict is Verdict.PASS


def test_a_process_that_dies_is_a_failure_with_its_last_words(tmp_path: Path) -> None:
    dying = subject_of(tmp_path, "process_dies", DIES)
    (group,) = groups_in_processes([dying])
    (failure,) = group.failures
    assert failure.check == "process" and "exit status 7" in str(failure.reason)
    assert failure.case[-1] == "the kernel's last words"
    assert f"fuselab check {dying.spec} --implementation plain" in str(failure.repeat_command)


def test_a_check_past_its_time_still_makes_a_quarter_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = [known for known in check_group.CHECKS if known.name in ("cases", "shapes", "layouts")]
    monkeypatch.setattr(check_group, "CHECKS", tuple(some))
    monkeypatch.setattr(check_group, "QUICK_BUDGET_S", 0.0)
    group = run_group(subject_of(tmp_path, "process_late"), None)
    counted = {entry.check: (entry.trials, entry.planned) for entry in group.results}
    assert counted["shapes"] == (10, 40) and counted["layouts"] == (14, 56)
    assert counted["cases"][0] == counted["cases"][1] > 0
    assert group.planned - group.trials == 30 + 42
