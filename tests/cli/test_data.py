"""``fuselab data``: what the screen and the JSON say, and what is refused."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy
import pytest
import torch

from fuselab.cli.main import run
from fuselab.data import Loader, Vocabulary, open_dataset, synthetic
from fuselab.data.metadata import Metadata, load_metadata, save_metadata, save_vocabulary
from fuselab.data.prepared import Prepared


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
    first = found["ids"][0]
    assert first["skew"] == pytest.approx(first["fullest_share"] * first["slots"])


def test_a_truncated_last_line_is_one_warning_on_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, facts = tmp_path / "rows.tsv", tmp_path / "facts.json"
    run(["data", "synthesize", "-o", str(file), "--rows", "10"])
    file.write_bytes(file.read_bytes()[:-100])
    capsys.readouterr()
    assert run(["data", "describe", str(file), "--json", str(facts)]) == 0
    warning = capsys.readouterr().err.splitlines()[-1]
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


def test_ctrl_c_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(synthetic, "to_text", interrupt)
    assert run(["data", "synthesize", "-o", str(tmp_path / "a.tsv"), "--rows", "10"]) == 130
    assert capsys.readouterr().err == "fuselab: interrupted; nothing half-written is left.\n"
    assert list(tmp_path.iterdir()) == []


def test_missing_files_and_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["data", "describe", str(tmp_path / "gone.tsv")]) == 2
    assert "no file" in capsys.readouterr().err
    assert run(["data", "synthesize", "-o", str(tmp_path / "gone" / "a.tsv")]) == 2
    assert "does not exist; make it first" in capsys.readouterr().err


def test_prepare_says_what_it_wrote_and_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, folder, facts = tmp_path / "rows.tsv", tmp_path / "out", tmp_path / "facts.json"
    run(["data", "synthesize", "-o", str(file), "--rows", "71"])
    text = file.read_text()
    file.write_text(text.replace("\n", "\nnot a row\n", 1))
    command = ["data", "prepare", str(file), "-o", str(folder), "--json", str(facts)]
    assert run(command) == 2
    assert f"{file}, line 2: no tab in the line" in capsys.readouterr().err
    command += ["--on-error", "skip", "--ids", "vocabulary", "--min-frequency", "2"]
    assert run(command) == 0
    streams = capsys.readouterr()
    assert "61 rows to train, 10 to validate; vocabulary ids" in streams.out
    assert "line 2: no tab in the line" in streams.err
    assert "malformed rows left out: 1." in streams.err
    assert "write: 1 of 1 parts, 71 rows" in streams.err
    found = json.loads(facts.read_text())
    assert (found["verb"], found["rejected"], found["rows"]) == ("data prepare", 1, 71)
    assert len(found["cardinalities"]) == 26
    assert run(["data", "describe", str(folder)]) == 0
    assert "71 rows" in capsys.readouterr().out


def test_prepare_like_another_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("first", "second"):
        run(["data", "synthesize", "-o", str(tmp_path / f"{name}.tsv"), "--rows", "500",
             "--seed", (name[0] == "s" and "1") or "0"])  # fmt: skip
    first = ["data", "prepare", str(tmp_path / "first.tsv"), "-o", str(tmp_path / "first"),
             "--ids", "vocabulary", "--dense", "shifted"]  # fmt: skip
    assert run(first) == 0
    like = ["data", "prepare", str(tmp_path / "second.tsv"), "-o", str(tmp_path / "second"),
            "--metadata", str(tmp_path / "first")]  # fmt: skip
    assert run([*like, "--dense", "log3"]) == 2
    assert "brings its transform along; leave --dense out" in capsys.readouterr().err
    assert run(like) == 0
    one, two = (Prepared(tmp_path / name) for name in ("first", "second"))
    assert one.cardinalities == two.cardinalities
    assert one.dense() == two.dense()


@pytest.mark.parametrize("name", ["metadata.json", "vocabulary.npz"])
def test_prepare_with_a_vocabulary_of_elsewhere(tmp_path: Path, name: str) -> None:
    rows, found = tmp_path / "rows.tsv", tmp_path / "out"
    run(["data", "synthesize", "-o", str(rows), "--rows", "50"])
    vocabulary = Vocabulary([numpy.array([-1, 7])] * 25 + [numpy.array([], dtype=numpy.int64)])
    if name.endswith(".json"):
        save_metadata(tmp_path / name, Metadata(vocabulary))
    else:
        save_vocabulary(tmp_path / name, vocabulary)
    told = ["--metadata", str(tmp_path / name), "--dense", "log3"]
    assert run(["data", "prepare", str(rows), "-o", str(found), *told]) == 0
    assert Prepared(found).cardinalities == (3,) * 25 + (1,)
    raw = open_dataset(rows, ids=load_metadata(tmp_path / name).ids, dense="log3")
    for batch, wanted in zip(Loader(found, 16), Loader(raw, 16), strict=True):
        assert all(map(torch.equal, batch, wanted))
        assert set(batch.sparse.unique().tolist()) <= {0, 2}  # missing, or unknown


def test_synthesize_prepared_and_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in (["-o", str(tmp_path / "a.parquet")], ["-o", str(tmp_path / "a"), "--prepared"]):
        assert run(["data", "synthesize", "--rows", "300", *options]) == 0
        assert run(["data", "describe", options[1]]) == 0
        assert "300 rows" in capsys.readouterr().out
    assert Prepared(tmp_path / "a").rows == 300
    facts = tmp_path / "facts.json"  # of a run that had nothing to do: no rate
    assert run(["data", "synthesize", "--rows", "300", *options, "--json", str(facts)]) == 0
    assert "seed 0, all or some of them prepared before\n" in capsys.readouterr().out
    assert json.loads(facts.read_text())["rows_per_s"] is None


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    file, plot = tmp_path / "rows.tsv", tmp_path / "rows.svg"
    run(["data", "synthesize", "-o", str(file), "--rows", "200"])
    assert run(["data", "describe", str(file), "--plot", str(plot)]) == 0
    drawn = plot.read_text()
    assert "<svg" in drawn
    for words in ("missing (%)", "distinct ids", "ids that share a slot (%)", "fullest slot"):
        assert words in drawn
    assert run(["data", "describe", str(file), "--plot", str(tmp_path / "rows.txt")]) == 2


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["describe", "ROWS", "--on-error", "stay"], "unknown answer to a malformed row 'stay'"),
        (["describe", "FOLDER", "--largest-table", "9"], "has its tables; leave --largest-table"),
        (["prepare", "ROWS", "-o", "NEW", "--ids", "hash"], "unknown kind of ids 'hash'"),
        (["prepare", "ROWS", "-o", "NEW", "--ids", "vocabulary", "--largest-table", "9"],
         "--largest-table is for ids by modulus"),
        (["prepare", "ROWS", "-o", "NEW", "--ids", "vocabulary", "--metadata", "FOLDER"],
         "give one of them"),
        (["prepare", "ROWS", "-o", "NEW", "--largest-table", "0"], "table': 0 is not in"),
        (["prepare", "FOLDER", "-o", "NEW"], "is prepared already"),
        (["synthesize", "-o", "NEW", "--largest-table", "9"], "add --prepared"),
        (["synthesize", "-o", "NEW", "--rows", "0"], "0 rows were asked for"),
        (["synthesize", "-o", "NEW.npz"], "become text or parquet; give another name than .npz"),
        (["prepare", "ROWS", "-o", "NEW", "--validation", "day"], "its last day is not known"),
    ],
)  # fmt: skip
def test_calls_that_are_wrong_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    places = {name: str(tmp_path / name) for name in ("ROWS", "FOLDER", "NEW", "NEW.npz")}
    run(["data", "synthesize", "-o", places["ROWS"], "--rows", "10"])
    run(["data", "synthesize", "-o", places["FOLDER"], "--rows", "10", "--prepared"])
    capsys.readouterr()
    assert run(["data", *(places.get(word, word) for word in options)]) == 2
    streams = capsys.readouterr()
    assert says in streams.err
    assert streams.err.count("\n") == 1
    assert {file.name for file in tmp_path.iterdir()} == {"ROWS", "FOLDER"}
