"""The vectors of the C++ kernels, built for every instruction set that this machine can build."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

import fuselab
from fuselab.runtime.compiler import compiler

PROGRAM = Path(__file__).with_name("cpu_vectors_check.cpp")
HEADERS = Path(fuselab.__file__).parent / "runtime" / "include"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
on_x86_64 = pytest.mark.skipif(
    platform.machine() != "x86_64", reason=f"builds for x86-64, and this is {platform.machine()}"
)


def build(tmp_path: Path, *command: str) -> Path:
    program = tmp_path / "check"
    options = ("-std=c++20", "-O2", f"-I{HEADERS}", str(PROGRAM), "-o", str(program))
    subprocess.run([*command, *options], check=True)
    return program


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout.splitlines()[-1]


def cpu_flags() -> set[str]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("flags"):
            return set(line.split(":")[1].split())
    return set()


@on_x86_64
@pytest.mark.parametrize(
    ("target", "flag", "width"),
    [
        ("x86-64", "sse2", 16),
        ("x86-64-v2", "sse4_2", 16),
        ("x86-64-v3", "avx2", 32),
        ("x86-64-v4", "avx512f", 64),
    ],
)
def test_conversions_are_those_of_the_formats(
    target: str, flag: str, width: int, tmp_path: Path
) -> None:
    program = build(tmp_path, compiler(), f"-march={target}")
    if flag not in cpu_flags():
        pytest.skip(f"it builds; this CPU has no {flag} to run it with")
    assert run(str(program)) == f"{width} bytes, 0 errors"


@pytest.mark.skipif(not shutil.which(CROSS_COMPILER), reason=f"no {CROSS_COMPILER} here")
def test_conversions_on_arm(tmp_path: Path) -> None:
    program = build(tmp_path, CROSS_COMPILER, "-static")
    if not shutil.which(EMULATOR):
        pytest.skip(f"it builds; there is no {EMULATOR} to run it with")
    assert run(EMULATOR, str(program)) == "16 bytes, 0 errors"
