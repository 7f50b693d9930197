"""The GPU campaign: which commands each stage runs, and that a failure is counted."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

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
    def words(stage: str, *options: str) -> list[str]:
        found = campaign.commands(stage, ["softmax"], tmp_path, list(options))
        return [" ".join(command.words[1:]) for command in found]

    json = f"--json {tmp_path}"
    assert words("check") == [f"-m fuselab check softmax --quick {json}/check-softmax.json"]
    assert words("full-check") == [f"-m fuselab check softmax {json}/full-check-softmax.json"]
    assert words("bench", "--budget", "0.3") == [
        f"-m fuselab bench softmax --backward --budget 0.3 {json}/bench-softmax.json"
    ]
    (plain,) = words("plain")  # compiles, which takes minutes under a sanitizer
    assert plain.endswith(f"sanitize.py softmax --record {tmp_path}/softmax.json")
    watched = words("sanitize")
    assert [line.split()[1] for line in watched] == ["memcheck", "racecheck", "initcheck"]
    enough = [f"softmax --only {tmp_path}/softmax.json" in line for line in watched]
    assert enough == [False, True, True]
    assert ["--zeroed-products" in line for line in watched] == [False, False, True]
    assert "-m gpu" in words("test")[0]


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
