"""``fuselab tune``: what is tried of a bare kernel, and what the verb says without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.packaging.tune_kernel import Plan, lists_of, planned, settings, tuned
from fuselab.report.tune_text import tune_text

KERNEL = """
import torch
import triton
import triton.language as tl


@triton.jit
def double_kernel(x, out, numel, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, 2 * tl.load(x + offsets, offsets < numel), offsets < numel)


@triton.jit
def rows_kernel(x, out, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    place = tl.program_id(0) * width + columns
    tl.store(out + place, tl.load(x + place, columns < width), columns < width)


def get_inputs():
    x = torch.arange(1000.0)
    return dict(x=x, out=torch.empty_like(x), numel=1000, BLOCK=64)
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "kernels.py"
    path.write_text(KERNEL)
    return str(path)


def test_the_own_setting_comes_first_and_the_grid_follows_the_block(file: str) -> None:
    plan = planned(f"{file}:double_kernel", {}, None)
    assert plan.settings[0] == {"BLOCK": 64}
    assert {"BLOCK": 1024, "num_warps": 4} in plan.settings
    assert {"BLOCK": 128, "num_warps": 16} not in plan.settings  # more threads than elements
    assert plan.grid({**plan.values, "BLOCK": 64}) == (16,)
    assert plan.grid({**plan.values, "BLOCK": 1024}) == (1,)
    assert plan.written == ["out"]


def test_lists_say_what_is_tried() -> None:
    lists = lists_of(["BLOCK=32,64", "num_warps=1"])
    assert lists == {"BLOCK": [32, 64], "num_warps": [1]}
    assert settings({"BLOCK": 128, "ACT": "relu"}, ["BLOCK"], lists, has_loop=False) == [
        {"BLOCK": 128, "ACT": "relu"},
        {"ACT": "relu", "BLOCK": 32, "num_warps": 1},
        {"ACT": "relu", "BLOCK": 64, "num_warps": 1},
    ]
    assert len(settings({}, ["A", "B"], {}, has_loop=True)) <= 48


def test_a_written_grid(file: str) -> None:
    plan = planned(f"{file}:double_kernel", {}, "cdiv(numel, 2 * BLOCK), 3")
    assert plan.grid({"numel": 100, "BLOCK": 10}) == (5, 3)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what works without a GPU")
def test_without_a_gpu_one_sentence_says_what_works(
    file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["tune", f"{file}:double_kernel"]) == 2
    said = capsys.readouterr().err.strip()
    assert "needs" in said or "there is none here" in said
    assert "fuselab asm" in said
    assert "\n" not in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([":nothing"], "has no 'nothing'"),
        ([""], "has several kernels; name one"),
        ([":double_kernel", "--set", "WRONG=1"], "has the constants BLOCK"),
        ([":double_kernel", "--set", "BLOCK"], "write NAME=1,2,4"),
        ([":double_kernel", "--set", "num_warps=0"], "whole numbers from 1 on"),
        ([":double_kernel", "--grid", "cdiv(numel"], "--grid cdiv(numel"),
        ([":double_kernel", "--grid", "wrong"], "has no argument wrong"),
    ],
)
def test_a_call_that_cannot_be_answered_is_one_sentence(
    file: str, capsys: pytest.CaptureFixture[str], words: list[str], sentence: str
) -> None:
    assert run(["tune", f"{file}{words[0]}", *words[1:]]) == 2
    said = capsys.readouterr().err.strip()
    assert sentence in said
    assert "\n" not in said


def test_the_screen() -> None:
    own = {"setting": {"BLOCK": 64}, "us": 10.0, "failed": None}
    fast = {"setting": {"BLOCK": 512, "num_warps": 4}, "us": 5.0, "failed": None}
    wrong = {"setting": {"BLOCK": 1}, "us": None, "failed": "out differs"}
    facts = {"kernel": "k", "first": own, "rows": [fast, own, wrong], "speedup": 2.0}
    text = tune_text(facts)
    assert text.index("BLOCK=512") < text.index("BLOCK=64")
    assert "BLOCK=1: out differs" in text
    assert "1/2.000 of the first one's time" in text


class Scaler:
    """Stands for a kernel: it multiplies by 2, wrongly for one block size, not at all for one."""

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(x: torch.Tensor, out: torch.Tensor, BLOCK: int, **_: object) -> None:
            if BLOCK == 3:
                raise RuntimeError("no such block")
            out += (3 if BLOCK == 2 else 2) * x

        return launch


def test_wrong_and_failing_settings_have_no_time() -> None:
    values = {"x": torch.ones(10), "out": torch.zeros(10), "BLOCK": 1}
    tried = [{"BLOCK": block} for block in (1, 2, 3, 4)]
    plan = Plan("scaler", Scaler(), values, lambda values: (1,), tried, ["out"])
    facts = tuned(plan, torch.device("cpu"), 0.01)
    rows = {row["setting"]["BLOCK"]: row for row in facts["rows"]}
    assert rows[1]["us"] > 0
    assert rows[4]["us"] > 0
    assert rows[2] == {
        "setting": {"BLOCK": 2},
        "us": None,
        "failed": "out differs from that of the first setting",
    }
    assert "no such block" in rows[3]["failed"]
    assert values["out"].sum() == 0  # the caller's tensors stay as they were


@pytest.mark.gpu
def test_on_a_gpu_every_right_setting_has_a_time(file: str, tmp_path: Path) -> None:
    result = tmp_path / "tune.json"
    words = ["--set", "BLOCK=64,256,1024", "--budget", "1", "--json", str(result)]
    assert run(["tune", f"{file}:double_kernel", *words]) == 0
    facts = json.loads(result.read_text())
    assert {row["setting"]["BLOCK"] for row in facts["rows"]} == {64, 256, 1024}
    assert all(row["us"] > 0 for row in facts["rows"])
    times = [row["us"] for row in facts["rows"]]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("some.cu", "__global__ void axpy() {}", "is no Python file; tune times Triton kernels"),
        ("gone.py", None, "no such file; give FILE.py:KERNEL"),
        (
            "launched.py",
            KERNEL.replace(
                "return dict(x=x, out=torch.empty_like(x), numel=1000, BLOCK=64)",
                "return [x]\n\n\ndef double(x):\n    double_kernel[(1,)](x, x, 1, 64)",
            ),
            "it has the arguments of double, and tune takes those of the kernel itself",
        ),
    ],
)
def test_a_file_that_cannot_be_tuned_is_one_sentence(name, text, words, tmp_path, capsys):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    assert run(["tune", f"{path}:double_kernel"]) == 2
    said = capsys.readouterr().err
    assert words in said and said.count("\n") == 1


def test_an_operator_is_sent_to_bench(capsys):
    assert run(["tune", "softmax"]) == 2
    assert "fuselab bench softmax --tune" in capsys.readouterr().err
