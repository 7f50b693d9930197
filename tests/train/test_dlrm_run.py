"""A whole run from the command line: it learns, and what was killed, stopped or broken goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuselab.cli.main import run
from fuselab.data import synthesize
from fuselab.models.dlrm_config import describe
from fuselab.train.dlrm import Plan, Run

TINY = """
dense_mlp = "13-24-4"
prediction_mlp = "16-1"
interaction = "dot"
largest_table = 300
[train]
batch_size = 128
lr = 0.2
"""
STEPS = 40


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("config") / "tiny.toml"
    path.write_text(TINY)
    return str(path)


def _words(config: str, folder: Path | None, *more: object) -> list[str]:
    words = ["train", "dlrm", "--config", config, "--device", "cpu", "--rows", "9000"]
    if folder is not None:
        words += ["--checkpoint", str(folder), "--checkpoint-every", "10"]
    return [*words, *map(str, more)]


def _trained(words: list[str], folder: Path) -> dict[str, Any]:
    assert run([*words, "--json", str(folder / "result.json")]) == 0
    return json.loads((folder / "result.json").read_text())


def _weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / f"step-{step:08}.safetensors")


@pytest.mark.parametrize(
    ("asked", "steps"),
    [
        ({}, 60),  # 7715 rows train of 9000, in batches of 128
        ({"steps": 70}, 70),
        ({"epochs": 2}, 120),
        ({"epochs": 2, "steps": 70}, 70),
        ({"epochs": 1, "steps": 70}, 60),
    ],
)
def test_the_first_of_steps_and_epochs_ends_it(
    asked: dict[str, int], steps: int, config: str
) -> None:
    plan = Plan(describe(config).config, "eager", rows=9000, batch_size=128, **asked)
    assert Run(plan, torch.device("cpu")).steps == steps


def _wait_for_a_checkpoint(child: subprocess.Popen[Any], folder: Path) -> None:
    deadline = time.monotonic() + 600
    while not list(folder.glob("step-*")) and time.monotonic() < deadline:
        if child.poll() is not None:
            break  # what it said is in the assertions that follow
        time.sleep(0.001)


def test_it_learns_the_planted_signal(config: str, tmp_path: Path) -> None:
    words = _words(config, None, "--rows", 40_000, "--lr", 0.03, "--optimizer", "adagrad")
    found = _trained(words, tmp_path)
    assert found["steps"] == 34_286 // 128
    assert found["held_out"]["rows"] == 5_714
    assert found["held_out"]["auc"] > 0.7
    assert found["held_out"]["accuracy"] > 0.75
    first, last = found["curve"][0][1], found["curve"][-1][1]
    assert last < first


def test_the_modes_have_one_loss_curve(config: str, tmp_path: Path) -> None:
    words = _words(config, None, "--steps", STEPS)
    curves = [
        _trained([*words, "--mode", mode], tmp_path)["curve"]
        for mode in ("eager", "compile", "fused")
    ]
    assert [len(curve) for curve in curves] == [1, 1, 1]
    losses = [[loss for _, loss in curve] for curve in curves]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_killed_and_resumed_ends_with_the_same_weights(config: str, tmp_path: Path) -> None:
    """Over the end of the first epoch (60 batches), killed as soon as a checkpoint is there."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    more = ("--deterministic", "--steps", 90, "--optimizer", "adam", "--decay", 1)
    try:
        assert run(_words(config, whole, *more)) == 0
        words = [sys.executable, "-m", "fuselab", *_words(config, killed, *more)]
        for _ in range(5):  # on a busy machine it may end before this process is woken
            shutil.rmtree(killed, ignore_errors=True)
            child = subprocess.Popen(words, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            _wait_for_a_checkpoint(child, killed)
            child.send_signal(signal.SIGKILL)
            if child.wait() != 0:
                break
        assert child.returncode == -signal.SIGKILL
        (killed / ".fuselab-00.safetensors").touch()  # as a kill in the middle of a write leaves it
        assert run([*_words(config, killed, *more), "--resume"]) == 0
    finally:
        torch.use_deterministic_algorithms(False)
    wanted, found = _weights(whole, 90), _weights(killed, 90)
    assert found.keys() == wanted.keys()
    assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()
    assert [file for file in os.listdir(killed) if file.startswith(".")] == []


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [(), ("--amp",)])
def test_resumed_on_a_gpu_ends_with_the_same_weights(
    config: str, tmp_path: Path, amp: tuple[str, ...]
) -> None:
    def train(folder: Path, steps: int, *more: str) -> None:
        words = [*_words(config, folder, "--deterministic", "--steps", steps, *amp), *more]
        words[words.index("cpu")] = "cuda"
        ended = subprocess.run([sys.executable, "-m", "fuselab", *words], capture_output=True)
        assert ended.returncode == 0, ended.stderr.decode()

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(whole, 40)
    train(stopped, 20)
    train(stopped, 40, "--resume")
    wanted, found = _weights(whole, 40), _weights(stopped, 40)
    assert {name for name, value in wanted.items() if not torch.equal(found[name], value)} == set()


def test_ctrl_c_writes_a_checkpoint_and_says_where_it_stopped(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def press() -> None:
        deadline = time.monotonic() + 600
        while not list(tmp_path.glob("step-*")) and time.monotonic() < deadline:
            time.sleep(0.001)
        os.kill(os.getpid(), signal.SIGINT)

    user = threading.Thread(target=press)
    user.start()
    assert run(_words(config, tmp_path, "--steps", 100_000)) == 130
    user.join()
    said = capsys.readouterr().err
    last = max(tmp_path.glob("step-*"))
    steps = int(last.stem.removeprefix("step-"))
    assert 10 <= steps < 100_000
    assert f"stopped behind step {steps:,} of 100,000; {last} is written" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(("first", "second"), [("eager", "fused"), ("fused", "eager")])
def test_a_checkpoint_moves_between_modes(
    config: str, tmp_path: Path, first: str, second: str
) -> None:
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    more = ("--optimizer", "adagrad", "--lr", 0.02)
    assert run(_words(config, whole, "--steps", 20, "--mode", first, *more)) == 0
    assert run(_words(config, moved, "--steps", 10, "--mode", first, *more)) == 0
    words = _words(config, moved, "--steps", 20, "--mode", second, *more)
    assert run([*words, "--resume"]) == 0
    for name, value in _weights(whole, 20).items():
        if not name.startswith("random/"):
            torch.testing.assert_close(
                _weights(moved, 20)[name].float(), value.float(), rtol=1e-3, atol=1e-4, msg=name
            )


def test_to_plain_pytorch_and_back(
    config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/train.md has it."""
    monkeypatch.chdir(tmp_path)
    more = ("--optimizer", "adagrad", "--lr", 0.02)
    assert run(_words(config, Path("kept"), "--steps", 10, *more)) == 0
    guide = Path(__file__).parents[2] / "docs" / "train.md"
    blocks = re.findall(r"(?:^    .*\n|^\n)+", guide.read_text(), re.MULTILINE)
    there, back = (textwrap.dedent(block) for block in blocks if "    from " in block)
    sizes = describe(config).config.table_sizes
    linear, relu = torch.nn.Linear, torch.nn.ReLU
    model = torch.nn.ModuleDict(
        {
            "dense_mlp": torch.nn.Sequential(linear(13, 24), relu(), linear(24, 4), relu()),
            "embeddings": torch.nn.ModuleList(torch.nn.Embedding(size, 4) for size in sizes),
            "prediction_mlp": torch.nn.Sequential(
                linear(4 + 27 * 26 // 2, 16), relu(), linear(16, 1)
            ),
        }
    )
    exec(there.replace("00001000", "00000010"), {"model": model})
    with torch.no_grad():
        model.get_parameter("prediction_mlp.2.bias").add_(1)
    exec(back, {"model": model})
    before, after = _weights(Path("kept"), 10), _weights(Path("mine"), 10)
    name = "model/prediction_mlp.2.bias"
    assert after[name] == before[name] + 1
    assert all(torch.equal(after[each], before[each]) for each in before if each != name)
    assert run([*_words(config, Path("mine"), "--steps", 20, *more), "--resume"]) == 0


def test_resume_without_a_checkpoint_says_that_it_starts_anew(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mistyped"
    assert run(_words(config, folder, "--steps", 2, "--resume")) == 0
    assert f"{folder} holds no checkpoint: starting anew\n" in capsys.readouterr().err


def test_nan_names_step_and_batch_and_keeps_the_last_good_one(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(_words(config, tmp_path, "--steps", 10)) == 0
    capsys.readouterr()
    words = _words(config, tmp_path, "--steps", 200, "--resume", "--lr", 1e38)
    assert run(words) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("fuselab: the loss of step 1")
    assert "(epoch 1, batch 1" in said
    assert f"{tmp_path / 'step-00000010.safetensors'} is kept" in said
    assert [file.name for file in tmp_path.iterdir()] == ["step-00000010.safetensors"]


def test_wrong_calls_are_one_sentence(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = tmp_path / "kept"
    assert run(_words(config, kept, "--steps", 2)) == 0
    other = tmp_path / "other.safetensors"
    save_file({"a": torch.zeros(1)}, other)
    outer = tmp_path / "outer.toml"
    outer.write_text(TINY.replace("dot", "outer"))
    huge = tmp_path / "huge.toml"
    huge.write_text(TINY.replace("13-24-4", f"13-{10**12}-4"))
    rows = tmp_path / "rows.tsv"
    synthesize(rows, 300)
    capsys.readouterr()
    for words, expected in (
        (_words(config, kept, "--steps", 2), "is there already; add --resume"),
        (_words(config, kept, "--resume", "--batch-size", 64), "with batch size 128, and this one"),
        (_words(config, kept, "--resume", "--optimizer", "adam"), "with optimizer sgd, and this"),
        (
            _words(str(outer), kept, "--resume"),
            "with config interaction dot, and this one has interaction outer; use",
        ),
        (_words(str(huge), None), "more memory than there is; give a smaller --batch-size"),
        (
            _words(config, kept, "--resume", "--data", rows, "--batch-size", 128),
            "with data synthetic, and this one has rows.tsv of",
        ),
        (_words(config, None, "--resume"), "say where with --checkpoint"),
        (_words(config, None, "--batch-size", 100_000), "7715 rows to train on"),
        (_words(config, None, "--batch-size", 0), "--batch-size is 0"),
        (_words(config, None, "--steps", 0), "--steps is 0; give 1 or more"),
        (_words(config, None, "--lr", 0), "the learning rate is 0.0"),
        (_words(config, None, "--lr", "inf"), "the learning rate is inf"),
        (_words(config, None, "--seed", -1), "--seed is -1; give 0 to 2^63 - 1"),
        (["train", "boxes", "--seed", str(2**63)], "--seed is 9223372036854775808"),
        (["train", "lora", "--seed", str(2**63)], "--seed is 9223372036854775808"),
        (_words(config, None, "--checkpoint-every", -1), "--checkpoint-every is -1"),
        (
            _words(config, None, "--data", rows, "--validation", tmp_path / "*.tsv"),
            "has rows of --data",
        ),
        (_words(config, None, "--mode", "fussed"), "Did you mean 'fused'?"),
        (_words(config, None, "--optimizer", "lion"), "unknown optimizer 'lion'"),
        (_words(config, None, "--data", tmp_path / "none"), "none"),
        (_words("medium", None), "unknown configuration 'medium'"),
    ):
        assert run(words) == 2, words
        said = capsys.readouterr().err.strip()
        assert expected in said
        assert "\n" not in said and "Traceback" not in said, said
    facts = {"format": "fuselab-checkpoint", "version": 1, "kind": "dlrm", "step": 2, "facts": {}}
    hand_made = {"fuselab": json.dumps(facts)}
    save_file({"a": torch.zeros(1)}, kept / "step-00000002.safetensors", hand_made)
    for words, lacking in (
        (_words(config, kept, "--resume"), "identity"),
        (["predict", str(kept), str(rows), "-o", str(tmp_path / "p.txt")], "plan"),
        (["export", "dlrm", str(kept), "--graph", str(tmp_path / "g.svg")], "plan"),
    ):
        assert run(words) == 2, words
        assert f"is damaged: it lacks '{lacking}'" in capsys.readouterr().err
    (kept / "step-00000002.safetensors").write_bytes(b"half")
    assert run(_words(config, kept, "--resume")) == 2
    assert "truncated or no checkpoint" in capsys.readouterr().err


def test_gradients_are_checked_first(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(_words(config, None, "--steps", 1, "--check-gradients")) == 0
    said = capsys.readouterr().out
    assert said.count(" right") == 9
    assert "WRONG" not in said


def test_trains_on_a_file(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.tsv"
    synthesize(path, 1400)
    capsys.readouterr()
    found = _trained(_words(config, None, "--data", path), tmp_path)
    assert "9 steps of 128 rows on cpu, 9 an epoch" in capsys.readouterr().err.splitlines()[0]
    assert found["steps"] == 1200 // 128
    assert found["held_out"]["rows"] == 200
    other = tmp_path / "other.tsv"
    synthesize(other, 50, seed=1)
    found = _trained(_words(config, None, "--data", path, "--validation", other), tmp_path)
    assert found["steps"] == 1400 // 128
    assert found["held_out"]["rows"] == 50
    # A malformed held-out row is told before the training, not instead of its result.
    other.write_text(other.read_text() + "1\tx2" + "\t1" * 12 + "\t0000000a" * 26 + "\n")
    capsys.readouterr()
    assert run(_words(config, None, "--data", path, "--validation", other)) == 2
    said = capsys.readouterr().err
    assert "line 51, column 2 (I1): found 'x2'" in said and "steps of" not in said
