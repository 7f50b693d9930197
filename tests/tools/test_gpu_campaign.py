"""The GPU campaign: which commands each stage runs, and that a failure is counted."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "gpu_campaign.py"


@pytest.fixture(scope="module")
def campaign() -> ModuleType:
    specification = importlib.util.spec_from_file_location("gpu_campaign", TOOL)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules["gpu_campaign"] = module
    specification.loader.exec_module(module)
    return module


def test_what_each_stage_runs(campaign: ModuleType, tmp_path: Path) -> None:
    def words(stage: str, *options: str, **more: Any) -> list[str]:
        found = campaign.commands(stage, ["softmax"], tmp_path, list(options), **more)
        return [" ".join(command.words[1:]) for command in found]

    file = f"--json {tmp_path}"
    assert words("check") == [
        f"-m fuselab check softmax --quick --seed 0 {file}/check-softmax-0.json"
    ]
    assert words("full-check", seeds=(7, 8)) == [
        f"-m fuselab check softmax --seed {seed} {file}/full-check-softmax-{seed}.json"
        for seed in (7, 8)
    ]
    assert words("bench", "--budget", "0.3") == [
        f"-m fuselab bench softmax --backward --budget 0.3 {file}/bench-softmax.json"
    ]
    (plain,) = words("plain")  # compiles, which takes minutes under a sanitizer
    assert plain.endswith(f"sanitize.py softmax --record {tmp_path}/softmax.json")
    watched = words("sanitize")
    assert [line.split()[1] for line in watched] == ["memcheck", "racecheck", "initcheck"]
    enough = [f"softmax --only {tmp_path}/softmax.json" in line for line in watched]
    assert enough == [False, True, True]
    assert ["--zeroed-products" in line for line in watched] == [False, False, True]
    assert all("--draws 5 --seed 9" in line for line in words("sanitize", seeds=(9,), draws=5))
    spread, alone = words("test")
    assert "-m gpu and not timing" in spread and "-n 10" in spread
    assert "-m gpu and timing" in alone and "-n" not in alone.split()


def test_verdicts_of_all_seeds_and_of_what_left_no_result(
    campaign: ModuleType, tmp_path: Path
) -> None:
    def written(name: str, seed: int, passed: bool, trials: int, planned: int) -> None:
        facts = {
            "passed": passed,
            "cut_short": trials < planned,
            "groups": [{"trials": trials, "planned": planned}],
        }
        (tmp_path / f"full-check-{name}-{seed}.json").write_text(json.dumps(facts))

    written("add", 1, True, 10, 10)
    written("add", 2, True, 11, 11)
    written("mlp", 1, False, 5, 5)
    written("mlp", 2, True, 5, 9)
    written("square", 1, True, 4, 4)
    found = campaign.verdicts("full-check", ["add", "mlp", "square"], tmp_path, (1, 2))
    assert found == [
        "add: PASS: 21 trials at 2 seeds",
        "mlp: FAIL at 1, cut short: 10 of 14 trials at 2 seeds",
        "square: FAIL at 2: 4 trials at 2 seeds",
    ]


def test_checks_share_the_cores_and_the_gpus(
    campaign: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(campaign.os, "sched_getaffinity", lambda process: range(16))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, expected in (
        (0, [{"OMP_NUM_THREADS": "2"}] * 8),
        (1, [{}] * 2),
        (2, [{"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "1"}]),
    ):
        monkeypatch.setattr(campaign.torch.cuda, "device_count", lambda count=count: count)
        monkeypatch.setattr(campaign.torch.cuda, "is_available", lambda count=count: count > 0)
        assert campaign.environments("full-check") == expected
        assert campaign.environments("bench") == [{}]
    listed = [
        campaign.Command(f"{number}", (sys.executable, "-c", f"exit({number % 2})"))
        for number in range(5)
    ]
    assert campaign.run_all("full-check", listed, tmp_path) == 2


def test_a_failure_is_said_and_counted(
    campaign: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {"good": 0, "bad": 3}
    results = [
        campaign.run(
            campaign.Command(name, (sys.executable, "-c", f"print('{name}!'); exit({status})")),
            tmp_path,
        )
        for name, status in ends.items()
    ]
    assert results == [True, False]
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["0", "3"]
    assert (tmp_path / "bad.log").read_text() == "bad!\n"
