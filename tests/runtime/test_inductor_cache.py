"""torch.compile's cache is not shared by instruction sets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuselab.runtime import inductor_cache

FOLDER, CAPABILITY = "TORCHINDUCTOR_CACHE_DIR", "ATEN_CPU_CAPABILITY"


def test_a_lowered_instruction_set_has_a_folder_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for capability in ("avx2", "DEFAULT"):
        monkeypatch.setenv(CAPABILITY, capability)
        monkeypatch.delenv(FOLDER, raising=False)
        inductor_cache.keep_apart()
        found.append(Path(os.environ[FOLDER]).name)
    assert found == [f"torchinductor_{os.getuid()}_{name}" for name in ("avx2", "default")]


def test_a_folder_that_was_chosen_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CAPABILITY, "avx2")
    monkeypatch.setenv(FOLDER, "mine")
    inductor_cache.keep_apart()
    assert os.environ[FOLDER] == "mine"
    monkeypatch.delenv(CAPABILITY)
    monkeypatch.delenv(FOLDER)
    inductor_cache.keep_apart()
    assert FOLDER not in os.environ


def test_the_command_line_keeps_them_apart() -> None:
    program = (
        "import os, sys; sys.argv = ['fuselab', '--version']\n"
        "from fuselab.__main__ import main\n"
        "try: main()\n"
        f"finally: print(os.environ['{FOLDER}'])"
    )
    asked = {name: value for name, value in os.environ.items() if name != FOLDER}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=asked | {CAPABILITY: "default"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.rstrip().endswith("_default"), done.stderr
