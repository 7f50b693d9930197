"""The entry point: a wrong call is one sentence on stderr and status 2."""

from __future__ import annotations

import pytest

from fuselab.cli.main import run


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["profil"], "fuselab: No such command 'profil'. Did you mean 'profile'?\n"),
        (["list", "--jsno", "x"], "fuselab: No such option '--jsno'. Did you mean '--json'?\n"),
        (["list", "--json", "nowhere/x"], None),
    ],
)
def test_a_wrong_call_is_one_sentence(
    arguments: list[str], sentence: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("fuselab: ")
    assert said == sentence or sentence is None


@pytest.mark.parametrize("words", [[], ["data"], ["train"], ["export"]])
def test_help_names_every_verb_in_a_whole_sentence(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run([*words, "--help"]) == 0
    _, commands = capsys.readouterr().out.split("Commands:\n")
    assert commands.count("\n") == commands.count(".\n"), commands
    assert "..." not in commands, commands
