"""tools/test_capabilities.py: which instruction sets it runs, and what it says of them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CLONE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CLONE / "tools"))

import test_capabilities as tool  # noqa: E402


def test_only_what_the_machine_can_run_is_run() -> None:
    assert tool.below("avx512") == ("default", "avx2")
    assert tool.below("avx2") == ("default",)
    assert tool.below("default") == tool.below("sve256") == ()


@pytest.mark.parametrize(
    ("code", "passed", "last"),
    [
        (0, True, "default: 3 passed in 0.10s"),
        (1, False, "default: 3 passed in 0.10s"),
        (5, False, "default: 3 passed in 0.10s"),
    ],
)
def test_each_run_has_both_variables_and_one_line(
    code: int,
    passed: bool,
    last: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seen: list[tuple[list[str], dict[str, str]]] = []

    def ended(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        environment = options["env"]
        assert isinstance(environment, dict)
        seen.append((command, environment))
        return subprocess.CompletedProcess(command, code, "...\n3 passed in 0.10s\n", "")

    monkeypatch.setattr(tool.subprocess, "run", ended)
    assert tool.run("default", ["-k", "softmax"]) == passed
    ((command, environment),) = seen
    assert command[-2:] == ["-k", "softmax"] and set(tool.FOLDERS) <= set(command)
    assert environment["ATEN_CPU_CAPABILITY"] == environment["FUSELAB_CPU_CAPABILITY"] == "default"
    assert environment["PATH"] == os.environ["PATH"]
    printed = capsys.readouterr().out.strip().splitlines()
    assert printed[-1] == last and (len(printed) == 1) == passed


def test_the_folders_are_there() -> None:
    assert all((CLONE / folder).is_dir() for folder in tool.FOLDERS)
