"""``fuselab tune``: what is tried of a bare kernel, and what the verb says without a GPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fuselab.cli.main import run
from fuselab.errors import TargetError
from fuselab.packaging.recorded_launch import on_device
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
    facts = {
        "kernel": "k",
        "notes": ["so it is"],
        "first": own,
        "rows": [fast, own, wrong],
        "speedup": 2.0,
    }
    text = tune_text(facts)
    assert text.index("BLOCK=512") < text.index("BLOCK=64")
    assert "BLOCK=1: out differs" in text
    assert "note: so it is" in text
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


DECORATED = """
import torch
import triton
import triton.language as tl


@triton.autotune(
    configs=[
        triton.Config({"BLOCK": 256}, num_warps=2),
        triton.Config({"BLOCK": 1024}, num_warps=8, pre_hook=lambda values: values["out"].zero_()),
    ],
    key=["numel"],
    prune_configs_by={"early_config_prune": lambda configs, values, **_: configs[1:]},
)
@triton.heuristics({"EVEN": lambda values: values["numel"] % values["BLOCK"] == 0})
@triton.jit
def double_kernel(x, out, numel, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (offsets < numel) | EVEN
    tl.store(out + offsets, 2 * tl.load(x + offsets, inside), inside)


@triton.heuristics({"BLOCK": lambda values: triton.next_power_of_2(values["width"]),
                    "num_warps": lambda values: 4})
@triton.jit
def rows_kernel(x, out, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    for _ in range(1):
        place = tl.program_id(0) * width + columns
        tl.store(out + place, tl.load(x + place, columns < width), columns < width)


def double(x):
    assert x.is_cuda
    out = torch.empty_like(x)
    double_kernel[lambda meta: (triton.cdiv(x.numel(), meta["BLOCK"]),)](x, out, x.numel())
    return out


def rows(x):
    out = torch.empty_like(x)
    rows_kernel[(x.shape[0],)](x, out, x.shape[1])
    return out


def get_inputs():
    return [torch.ones(6, 100)]
"""


def test_the_configurations_of_autotune_are_tried_with_the_functions_arguments(
    tmp_path: Path,
) -> None:
    path = tmp_path / "decorated.py"
    path.write_text(DECORATED)
    for spec in (f"{path}:double_kernel", f"{path}:double"):
        plan = planned(spec, {}, None)
        assert plan.settings == [
            {"BLOCK": 256, "num_warps": 2, "num_stages": 3},
            {"BLOCK": 1024, "num_warps": 8, "num_stages": 3},
        ]
        assert plan.values["numel"] == 600
        assert plan.grid({**plan.values, "BLOCK": 256}) == (3,)
        assert plan.completed({"numel": 600, "BLOCK": 200})["EVEN"] is True
        assert plan.completed({"numel": 600, "BLOCK": 256})["EVEN"] is False
        assert list(plan.hooks) == ["BLOCK=1024, num_warps=8, num_stages=3"]
        assert plan.notes == [
            "the 2 configurations of its @triton.autotune are tried",
            "its @triton.heuristics compute EVEN",
        ]
    plan = planned(f"{path}:double", {"num_warps": [1, 16]}, None)
    assert [(one["BLOCK"], one["num_warps"]) for one in plan.settings] == [
        (256, 1), (256, 16), (1024, 1), (1024, 16)
    ]  # fmt: skip


def test_what_heuristics_compute_is_not_tried_and_their_grid_stays(tmp_path: Path) -> None:
    path = tmp_path / "decorated.py"
    path.write_text(DECORATED)
    plan = planned(f"{path}:rows", {}, None)
    assert plan.settings == [{}, {"num_stages": 2}, {"num_stages": 3}, {"num_stages": 4}]
    assert plan.grid(plan.values) == (6,)
    assert plan.completed(plan.values)["BLOCK"] == 128
    kept = planned(f"{path}:rows", {"BLOCK": [256]}, None)
    assert kept.completed({**kept.values, **kept.settings[-1]})["BLOCK"] == 256


def test_a_setting_that_a_function_passes_is_the_first(tmp_path: Path) -> None:
    path = tmp_path / "launched.py"
    launcher = (
        "return [x]\n\n\ndef double(x, block=64):\n    out = torch.empty_like(x)\n"
        "    grid = (triton.cdiv(x.numel(), block),)\n"
        "    double_kernel[grid](x, out, x.numel(), BLOCK=block, num_warps=1)\n    return out\n"
    )
    offered = "return dict(x=x, out=torch.empty_like(x), numel=1000, BLOCK=64)"
    path.write_text(KERNEL.replace(offered, launcher))
    plan = planned(f"{path}:double_kernel", {}, None)
    assert plan.settings[0] == {"BLOCK": 64, "num_warps": 1}
    assert {"BLOCK": 1024, "num_warps": 4} in plan.settings
    assert plan.grid({**plan.values, "BLOCK": 512}) == (2,)
    # A grid that the kernel's text does not tell stays as it is, and so do the blocks.
    other = tmp_path / "fixed.py"
    other.write_text(KERNEL.replace(offered, launcher.replace("x.numel(), block),", "1, 1), 3")))
    plan = planned(f"{other}:double_kernel", {}, None)
    assert plan.grid({**plan.values, "BLOCK": 512}) == (1, 3)
    assert {one["BLOCK"] for one in plan.settings} == {64}
    assert "--grid says how many" in plan.notes[0]


def test_hooks_and_heuristics_run_before_each_launch() -> None:
    values = {"x": torch.ones(10), "out": torch.zeros(10)}
    met: list[object] = []
    plan = Plan(
        "scaler",
        Scaler(),
        values,
        lambda values: (values["BLOCK"],),
        [{"num_warps": 1}],
        ["out"],
        completed=lambda values: {**values, "BLOCK": 7},
        hooks={"num_warps=1": lambda values: met.append(values["BLOCK"])},
    )
    assert tuned(plan, torch.device("cpu"), 0.01)["rows"][0]["us"] > 0
    assert set(met) == {7}


def test_no_setting_that_runs_is_an_error() -> None:
    values = {"x": torch.ones(10), "out": torch.zeros(10)}
    plan = Plan("scaler", Scaler(), values, lambda values: (1,), [{"BLOCK": 3}], ["out"])
    with pytest.raises(TargetError, match=r"no setting of scaler ran; the first: .*no such block"):
        tuned(plan, torch.device("cpu"), 0.01)


def test_copies_keep_strides_and_what_shares_memory() -> None:
    whole = torch.arange(12.0).view(3, 4)
    part, same = on_device((whole[:, 1:3], whole), torch.device("cpu"))
    assert part.stride() == (4, 1) and part.storage_offset() == 1
    part.zero_()
    assert same.tolist() == [[0, 0, 0, 3], [4, 0, 0, 7], [8, 0, 0, 11]]
    assert whole.sum() == 66


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["double_kernel", "double", "rows"])
def test_decorated_kernels_are_timed_on_a_gpu(name: str, tmp_path: Path) -> None:
    path, result = tmp_path / "decorated.py", tmp_path / "tune.json"
    path.write_text(DECORATED)
    assert run(["tune", f"{path}:{name}", "--budget", "1", "--json", str(result)]) == 0
    facts = json.loads(result.read_text())
    assert all(row["us"] > 0 for row in facts["rows"])
    assert len(facts["rows"]) == (4 if name == "rows" else 1)  # one of the two is pruned


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
                "return [x]\n\n\ndef double(x, y):\n    double_kernel[(1,)](x, y, 1, 64)",
            ),
            "lacks out, numel of double_kernel",
        ),
        (
            "foreign.py",
            KERNEL.replace("@triton.jit\ndef double", "@foreign\n@triton.jit\ndef double").replace(
                "@foreign",
                "def foreign(f):\n    kind = type('Mine', (triton.KernelInterface,), {})\n"
                "    one = kind()\n    one.fn = f\n    return one\n\n\n@foreign",
            ),
            "decorated by Mine, which is not Triton's",
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
