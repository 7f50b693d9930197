"""The entry point: a wrong call is one sentence on stderr and status 2."""

from __future__ import annotations

import pytest

from fuselab.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["profil"], "fuselab: No such command 'profil'. Did you mean 'profile'?\n"),
        (["list", "--jsno", "x"], "fuselab: No such option '--jsno'. Did you mean '--json'?\n"),
        (
            ["eject", "softmax"],
            "fuselab: No such command 'eject'. 'fuselab --help' shows the call.\n",
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


@pytest.mark.parametrize("words", [[], ["data"], ["train"], ["export"]])
def test_help_names_every_verb_in_a_whole_sentence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    _, commands = capsys.readouterr().out.split("Commands:\n")
    assert commands.count("\n") == commands.count(".\n"), commands
    assert "..." not in commands, commands
