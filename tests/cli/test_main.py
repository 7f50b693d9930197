"""The entry point: a wrong call is one sentence on stderr and status 2."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from fuselab.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["profil"], "fuselab: No such command 'profil'. Did you mean 'profile'?\n"),
        (["list", "--jsno", "x"], "fuselab: No such option '--jsno'. Did you mean '--json'?\n"),
        (
            ["jury", "softmax"],
            "fuselab: No such command 'jury'. 'fuselab --help' shows the call.\n",
        ),
        (
            ["fuse", "model.py"],
            "fuselab: 'fuse' is no command, for it changes a model that runs: call "
            "fuselab.fuse(model, example_inputs) in Python. 'fuselab study' shows what it would do."
            "\n",
        ),
        (
            ["train", "dlrm", "--seed", "x"],
            "fuselab: Invalid value for '--seed': 'x' is not a valid integer. "
            "'fuselab train dlrm --help' shows the call.\n",
        ),
        (["list", "--json", "nowhere/x"], None),
        # Before the target is looked for, and so before it is compiled or profiled.
        (
            ["explain", "nowhere.py", "--save", "/dev/null"],
            "fuselab: cannot write in /dev/null: /dev/null is a file; give a folder.\n",
        ),
        (["profile", "nowhere.py", "--tensorboard=/dev/null/x"], None),
        (["export", "dlrm", "nowhere", "-o", "x.onnx", "--graph", "nowhere/x.svg"], None),
    ],
)
def test_a_wrong_call_is_one_sentence(
    arguments: list[str], sentence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("fuselab: ")
    assert said == sentence or (sentence is None and "cannot write" in said)


@pytest.mark.parametrize(
    "words",
    [
        ["check", "own.py", "--json", "own.py"],
        ["check", "./own.py", "--json=own.py"],
        ["bench", "own.py:OP", "--plot", "linked.py"],
        ["profile", "--data", "own.py", "model.py", "--trace", "own.py"],
        ["predict", "kept", "own.py", "-o", "own.py"],
        ["predict", "kept", "o*.py", "-oown.py"],
        ["export", "dlrm", "own.py", "--output=own.py"],
    ],
)
def test_a_result_does_not_take_the_place_of_what_is_read(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").write_text("OP = 1\n")
    (tmp_path / "linked.py").symlink_to("own.py")
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "would take the place of what this call reads; give another name.\n" in said
    assert said.count("\n") == 1
    assert (tmp_path / "own.py").read_text() == "OP = 1\n"


def test_the_same_word_for_other_files_is_no_clash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.json").write_text("{}")
    assert run(["list", "--json", "old.json"]) == 0  # replaces a result
    assert run(["list", "--json", "list"]) == 0
    assert run(["list", "--json", "list"]) == 0  # a file of the verb's name
    (tmp_path / "auto").write_text("{}")
    assert run(["list", "--json", "auto"]) == 0  # a file of a default's name


def test_warnings_of_ours_are_a_sentence_without_code(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    row = "\t".join(["1", *["1"] * 13, *["0000000a"] * 26])
    (tmp_path / "rows.tsv").write_text(f"{row}\n" * 70 + row[:20])
    words = ["--config", "small", "--data", str(tmp_path / "rows.tsv"), "--steps", "1"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run(["train", "dlrm", *words, "--batch-size", "8"]) == 0
    said = [line for line in capfd.readouterr().err.splitlines() if "rows.tsv" in line]
    assert said and all(line.startswith("fuselab: warning: ") for line in said)


@pytest.mark.parametrize("words", [[], ["data"], ["train"], ["export"]])
def test_help_names_every_verb_in_a_whole_sentence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    _, commands = capsys.readouterr().out.split("Commands:\n")
    assert commands.count("\n") == commands.count(".\n"), commands
    assert "..." not in commands, commands
