"""The verbs profile and explain from the command line: exit status, screen, JSON."""

import json
from pathlib import Path

import pytest

from fuselab.cli.main import run

TARGETS = Path(__file__).parent / "targets"


def test_screen_and_json_show_the_same_numbers_in_80_columns(tmp_path, capsys):
    file = tmp_path / "profile.json"
    target = str(TARGETS / "linear_relu.py")
    arguments = ["profile", target, "--backward", "--schedule", "0,1,3,1", "--device", "cpu"]
    assert run([*arguments, "--json", str(file)]) == 0
    text = capsys.readouterr().out
    facts = json.loads(file.read_text())
    assert (facts["schema"], facts["verb"]) == (1, "profile")
    assert facts["environment"]["torch"] and facts["target"] == target
    assert max(map(len, text.splitlines())) <= 80
    from fuselab.report.numbers import duration, share

    assert duration(facts["step_us"]) in text
    for row in facts["lines"]:
        assert duration(row["total_us"]) in text and share(row["share"]) in text
    assert duration(facts["wall"]["us"]) in text and len(facts["wall"]["rounds_us"]) >= 10
    for other in (str(file), target):
        plot = tmp_path / "p.png"
        assert run([*arguments, "--against", other, "--plot", str(plot)]) == 0
        text = capsys.readouterr().out
        assert "Against" in text and max(map(len, text.splitlines())) <= 80
        assert plot.read_bytes().startswith(b"\x89PNG")
    assert "rounds, both in turn in this run" in text


def test_hostile_text_reaches_the_screen_as_text(capsys):
    assert run(["profile", f"{TARGETS / 'sins.py'}:hostile", "--schedule", "0,1,1,1"]) == 0
    assert "[red]<script>alert(1)</script>[/red]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["profile", "nope.py"], "no file 'nope.py'"),
        (["profile", "dlmr"], "did you mean 'dlrm'?"),
        (["profile", "dlrm", "--device", "cpu", "--blocking"], "--blocking is for a GPU"),
        (["profile", "dlrm", "extra"], "unexpected 'extra'"),
        (["profile", "dlrm", "--schedule", "1,2"], "schedule"),
        (["profile", "dlrm", "--against", "nope.json"], "cannot read 'nope.json'"),
        (["profile", "python"], "name the script"),
        (["profile", "--", "python3", "-m"], "name the script"),
        (["profile", "--", "python", "-u", "x.py"], "name the script"),
        (["profile", "--", "/nowhere/python3", "x.py"], "is another Python than fuselab's"),
        (["profile", "gone.json"], "no file 'gone.json'"),
        (["profile", "gone.json", "--backward"], "a trace has its own"),
        (["profile", "gone.json", "--schedule", "0,1,1,1"], "a trace is recorded"),
        (["profile", "gone.json", "--against", "dlrm"], "give an earlier --json FILE"),
        (["profile", "dlrm", "--plot", "p.txt"], "a plot is written as .png"),
        (["profile", "--backward", "--", "python", "x.py"], "belong to a TARGET"),
        (["explain", "dlrm", "--mode", "fast"], "mode 'fast' is unknown"),
        (["explain", "nope.py"], "no file 'nope.py'"),
        (["explain", "dlrm", "--device", "warp"], "'warp' is no device"),
    ],
)
def test_mistakes_are_one_sentence_and_status_2(arguments, words, capsys, monkeypatch):
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")  # --blocking sets it before it refuses
    assert run(arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.startswith("fuselab: ") and error.count("\n") == 1
