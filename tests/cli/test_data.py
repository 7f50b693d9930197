"""``fuselab data``: what the screen and the JSON say, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from fuselab.cli.main import run


def test_synthesize_then_describe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, facts = tmp_path / "rows.tsv.gz", tmp_path / "facts.json"
    assert run(["data", "synthesize", "-o", str(file), "--rows", "3000", "--seed", "7"]) == 0
    assert "3,000 rows, seed 7" in capsys.readouterr().out
    assert run(["data", "describe", str(file), "--json", str(facts)]) == 0
    screen = capsys.readouterr().out
    found = json.loads(facts.read_text())
    assert (found["schema"], found["verb"], found["rows"]) == (1, "data describe", 3000)
    assert f"positives  {found['positives']:,} ({found['label_rate']:.2%})" in screen
    assert len(found["counts"]) == 13
    for ids in found["ids"]:
        assert screen.split(f" {ids['name']} ")[1].split()[1] == f"{ids['cardinality']:,}"
    assert found["environment"]["torch"]
    assert max(map(len, screen.splitlines())) <= 80


def test_a_truncated_last_line_is_one_warning_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, facts = tmp_path / "rows.tsv", tmp_path / "facts.json"
    run(["data", "synthesize", "-o", str(file), "--rows", "10"])
    file.write_bytes(file.read_bytes()[:-100])
    capsys.readouterr()
    assert run(["data", "describe", str(file), "--json", str(facts)]) == 0
    warning = capsys.readouterr().err.strip()
    found = json.loads(facts.read_text())
    assert found["rows"] == 9
    assert warning == f"fuselab: warning: {found['left_out'][0]}"
    assert f"{file}, line 10: the last line stops after" in warning


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda fields: fields[:39], "line 2, column 39: 39 columns; expected 40 tab-separated"),
        (lambda fields: [*fields, ""], "line 2, column 41: 41 columns; expected 40 tab-separated"),
        (lambda fields: ["x", *fields[1:]], "line 2, column 1 (label): found 'x'; expected 0 or 1"),
    ],
)
def test_a_malformed_file_is_one_sentence_and_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change, says: str
) -> None:
    file = tmp_path / "rows.tsv"
    run(["data", "synthesize", "-o", str(file), "--rows", "3"])
    lines = [text.split("\t") for text in file.read_text().splitlines()]
    lines[1] = change(lines[1])
    file.write_text("".join("\t".join(fields) + "\n" for fields in lines))
    capsys.readouterr()
    assert run(["data", "describe", str(file), "--json", str(tmp_path / "facts.json")]) == 2
    streams = capsys.readouterr()
    assert streams.out == ""
    assert streams.err.startswith(f"fuselab: {file}, {says}")
    assert streams.err.count("\n") == 1
    assert not (tmp_path / "facts.json").exists()


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.tsv"
    file.write_text("kept")

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert run(["data", "synthesize", "-o", str(file), "--rows", "10"]) == 2
    assert "the disk is full" in capsys.readouterr().err
    assert file.read_text() == "kept"
    assert list(tmp_path.iterdir()) == [file]


def test_missing_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "describe", str(tmp_path / "gone.tsv")]) == 2
    assert "no file" in capsys.readouterr().err
    assert run(["data", "synthesize", "-o", str(tmp_path / "gone" / "a.tsv")]) == 2
    assert "does not exist; make it first" in capsys.readouterr().err
