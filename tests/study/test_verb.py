"""``fuselab study``: what it leaves, what it refuses, and one real run of a small function."""

from __future__ import annotations

import errno
import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from sample_study import sample_study

import fuselab.study.run
from fuselab.cli.main import run
from fuselab.measure.fresh import PINNED_ALLOCATION
from fuselab.report.html import study_page
from fuselab.report.study_text import study_text
from fuselab.runtime import cpu_choice
from fuselab.study.facts import Study


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    """No fresh process for the sake of the allocator."""
    for name, value in PINNED_ALLOCATION.items():
        monkeypatch.setenv(name, value)


def answer(monkeypatch: pytest.MonkeyPatch, study: Study) -> None:
    monkeypatch.setattr(fuselab.study.run, "study", lambda *args, **kwargs: study)


@pytest.mark.usefixtures("pinned")
def test_report_json_and_screen_are_one_set_of_facts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, sample_study())
    extra = tmp_path / "extra.json"
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "theirs.txt").write_text("kept")
    (tmp_path / "out" / "report.html").write_text("old")
    assert run(["study", "dlrm", "-o", str(tmp_path / "out"), "--json", str(extra)]) == 0
    facts = json.loads((tmp_path / "out" / "report.json").read_text())
    assert facts == json.loads(extra.read_text())
    assert (facts["schema"], facts["verb"]) == (1, "study")
    assert (tmp_path / "out" / "report.html").read_text() == study_page(facts)
    screen = capsys.readouterr().out
    assert screen == f"{study_text(facts)}\n\nreport: {tmp_path}/out/report.html\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "report.html",
        "report.json",
        "theirs.txt",
    ]


@pytest.mark.usefixtures("pinned")
def test_a_progress_line_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def study(*args: object, progress: Callable[[str], None], **kwargs: object) -> Study:
        progress("embedding_lookup: " + "100x8 " * 40)
        return sample_study()

    monkeypatch.setattr(fuselab.study.run, "study", study)
    assert run(["study", "dlrm", "-o", str(tmp_path)]) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert len(line) == 80
    assert "s  embedding_lookup: 100x8 " in line and line.endswith("…")


@pytest.mark.usefixtures("pinned")
def test_a_failed_check_is_status_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    study = sample_study()
    failed = replace(study.checks[0], verdict="FAIL", reason="values: row 0 is off by 9 ulp")
    answer(monkeypatch, replace(study, checks=(failed,)))
    assert run(["study", "dlrm", "-o", str(tmp_path)]) == 1
    assert "FAIL" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("pinned")
def test_a_full_disk_is_one_sentence_and_leaves_no_half_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer(monkeypatch, sample_study())

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert run(["study", "dlrm", "-o", str(tmp_path / "out")]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"fuselab: cannot write {tmp_path}/out/report.json: the disk is full; free some space or "
        "choose another folder."
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("pinned")
def test_bad_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for arguments, says in (
        (["study", "nothing.py", "-o", str(tmp_path / "out")], "no file 'nothing.py'"),
        (["study", "dlrm", "-o", str(tmp_path / "file")], "is a file; give a folder"),
        (
            ["study", "dlrm", "-o", str(tmp_path / "out"), "--data", str(tmp_path / "gone.tsv")],
            "gone.tsv'; give the path",
        ),
    ):
        assert run(arguments) == 2
        error = capsys.readouterr().err.splitlines()[-1]
        assert error.startswith("fuselab: ")
        assert says in error
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


FUNCTION = '''
import torch

def gate(x, bias):
    """<script>alert(1)</script>"""
    return torch.relu(x + bias)  # <img src=x onerror=alert(1)>

def get_inputs():
    return [torch.randn(256, 512), torch.randn(512)]
'''


@pytest.mark.usefixtures("pinned")
def test_a_real_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """About 20 s: two fresh processes compile it."""
    (tmp_path / "gate.py").write_text(FUNCTION)
    out = tmp_path / "out"
    # auto takes the reference where nothing faster was measured for this machine.
    with cpu_choice.forced("cpp"):
        status = run(["study", str(tmp_path / "gate.py"), "-o", str(out), "--quick"])
    streams = capsys.readouterr()
    facts = json.loads((out / "report.json").read_text())
    failed = [row["reason"] for row in facts["checks"] if row["verdict"] == "FAIL"]
    assert (status, failed) == (0, [])
    assert facts["subject"]["name"] == "gate"
    assert facts["subject"]["arguments"] == [
        {"name": "x", "shape": "256, 512", "dtype": "float32"},
        {"name": "bias", "shape": "512", "dtype": "float32"},
    ]
    ways = {way["name"]: way for way in facts["ways"]}
    assert list(ways) == ["eager", "fused", "compiled", "compiled_fused"]
    assert ways["eager"]["us"] > 0
    assert ways["compiled"]["us"] > 0
    assert facts["compiler"]["graphs"] == 1
    measured = [row for row in facts["replaced"] if row["before_us"] is not None]
    # A kernel of its own is tried too where the library's operator was not faster.
    tried = {re.sub(r"_[0-9a-f]{10}$", "", row["operator"]) for row in measured}
    assert "bias_activation" in tried and tried <= {"bias_activation", "add_relu"}
    assert {row["operator"] for row in facts["checks"]} == {row["operator"] for row in measured}
    assert facts["benches"][0]["case"] in ("256x512 512 relu", "256x512 512")
    # x, bias and the result once, in fp32.
    assert facts["limit"]["bytes"] == 4 * (256 * 512 + 512 + 256 * 512)
    page = (out / "report.html").read_text()
    assert page == study_page(facts)
    assert page.count("<script") == 1
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert facts["headline"]["sentence"].replace(" ", "") in streams.out.replace("\n", "").replace(
        " ", ""
    )
