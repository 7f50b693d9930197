"""The answers of the compiler are kept on disk, for the compiler and the CPU that gave them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from fuselab.errors import BuildError
from fuselab.runtime import compiler_answers
from fuselab.runtime.compiler_answers import macros, takes


class Asked:
    """A stand-in for the compiler: it counts its runs, and ends with ``status``."""

    def __init__(self) -> None:
        self.runs = 0
        self.status = 0

    def __call__(self, command: list[str], **pipes: object) -> subprocess.CompletedProcess[str]:
        self.runs += 1
        return subprocess.CompletedProcess(command, self.status, "#define A 1\n", "")


def in_a_new_process() -> None:
    """Forget what this process knows of the compiler's answers."""
    for function in (takes, macros, compiler_answers._cpu):
        function.cache_clear()


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    command, stand_in = tmp_path / "c++", Asked()
    command.write_text("the first\n")
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(compiler_answers, "compiler", lambda: str(command))
    monkeypatch.setattr(compiler_answers, "compiler_version", lambda: "1.0")
    monkeypatch.setattr(compiler_answers, "run_command", stand_in)
    in_a_new_process()
    yield stand_in
    in_a_new_process()


@pytest.mark.parametrize(("status", "known"), [(0, True), (1, False)])
def test_a_new_process_finds_the_answers(asked: Asked, status: int, known: bool) -> None:
    asked.status = status
    for _ in range(2):
        in_a_new_process()
        assert takes("-mnew") is known
        assert macros("-mnew") == ("#define A 1\n" if known else "")
    assert asked.runs == 2


def test_another_compiler_and_another_cpu_are_asked_again(
    asked: Asked, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert takes("-mnew")
    (tmp_path / "c++").write_text("the second one\n")
    os.utime(tmp_path / "c++", ns=(1, 1))
    asked.status = 1
    in_a_new_process()
    assert not takes("-mnew")
    (tmp_path / "cpuinfo").write_text("flags : none\ncpu MHz : 1\n")
    monkeypatch.setattr(compiler_answers, "_CPU", tmp_path / "cpuinfo")
    in_a_new_process()
    takes("-mnew")
    (tmp_path / "cpuinfo").write_text("flags : none\ncpu MHz : 2\n")
    in_a_new_process()
    takes("-mnew")
    assert asked.runs == 3


def test_a_compiler_that_is_stopped_has_not_answered(asked: Asked) -> None:
    asked.status = -9
    with pytest.raises(BuildError, match="does not end"):
        takes("-mnew")
    asked.status = 0
    assert takes("-mnew")
