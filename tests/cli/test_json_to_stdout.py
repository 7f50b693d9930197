"""``--json -``: the JSON alone on stdout, the text for people on stderr, in every verb alike."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import typer

from fuselab.cli.main import build_app, run
from fuselab.cli.options import WrittenJson
from fuselab.measure.fresh import child_environment

BARE = str(Path(__file__).resolve().parents[2] / "examples" / "bare_kernel.py")
MODEL = """
import torch


def model(x):
    return (x * 2).relu()


def get_inputs():
    return [torch.randn(64, 64)]
"""


def commands(group: click.Group, above: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{above}{name} ")
        else:
            yield f"{above}{name}", command


def test_every_json_option_is_the_same_one() -> None:
    group = typer.main.get_command(build_app())
    assert isinstance(group, click.Group)
    kinds = {
        name: parameter.type
        for name, command in commands(group)
        for parameter in command.params
        if parameter.name == "json"
    }
    assert len(kinds) >= 20 and all(isinstance(kind, WrittenJson) for kind in kinds.values())


@pytest.mark.parametrize(
    ("words", "verb", "told"),
    [
        (["list"], "list", "softmax"),
        (["debug", BARE], "debug", "add_kernel, 2 programs"),  # a child process prints
        (["profile", "model.py"], "profile", "relu"),
        (["data", "synthesize", "-o", "rows.tsv", "--rows", "10"], "data synthesize", "rows.tsv"),
        (["data", "describe", "made.tsv"], "data describe", "rows"),
        (
            # another process of the verb itself measures
            ["bench", "add", "--provider", "eager", "--case", "4x4", "--budget", "0.1"],
            "bench",
            "fuselab::add on",
        ),
        (
            # the ranks are other processes too
            [
                *["train", "dlrm", "--config", "small", "--data", "made.tsv", "--steps", "2"],
                *["--batch-size", "8", "--ranks", "2"],
            ],
            "train dlrm",
            "loss",
        ),
    ],
)
def test_json_alone_is_on_stdout(
    words: list[str], verb: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    row = "\t".join(["1", *["1"] * 13, *["0000000a"] * 26])
    Path("made.tsv").write_text(f"{row}\n" * 64)
    done = subprocess.run(
        [sys.executable, "-m", "fuselab", *words, "--json", "-"],
        capture_output=True,
        text=True,
        env=child_environment(),
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert facts["verb"] == verb and facts["schema"] == 1
    assert told in done.stderr
    assert not Path("-").exists()


def test_in_the_same_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", "--json", "-"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["verb"] == "list"
    assert "softmax" in printed.err
    assert run(["list"]) == 0  # stdout is as it was
    assert "softmax" in capsys.readouterr().out


def test_a_wrong_call_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "nowhere.py", "--json", "-"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1


def test_a_file_of_that_name_has_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["list", "--json", "./-"]) == 0
    assert json.loads((tmp_path / "-").read_text())["verb"] == "list"


@pytest.mark.parametrize(
    "words",
    [["predict", "kept", "rows.tsv", "-o", "-"], ["profile", "model.py", "--trace", "-"]],
)
def test_other_results_do_not_go_to_stdout(
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(words) == 2
    said = capsys.readouterr().err
    assert "give a name; of results only --json goes to stdout.\n" in said
    assert said.count("\n") == 1 and not (tmp_path / "-").exists()
