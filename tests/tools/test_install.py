"""``make install``: half-made environments, missing tools, odd paths; nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

CLONE = Path(__file__).resolve().parents[2]
CLEAN = {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """What an install reads of a clone, in a folder with spaces in its path."""
    folder = tmp_path / "my fused  clone"
    (folder / "tools").mkdir(parents=True)
    for name in ("Makefile", "requirements.lock", "tools/install.py"):
        shutil.copy(CLONE / name, folder / name)
    return folder


@pytest.fixture
def installer(clone: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """tools/install.py of that clone; ``create`` makes a Python that runs, pip is not called."""
    specification = importlib.util.spec_from_file_location("install", clone / "tools/install.py")
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)

    def create() -> None:
        (module.ENVIRONMENT / "bin").mkdir(parents=True)
        (module.ENVIRONMENT / "bin" / "python").symlink_to(sys.executable)

    monkeypatch.setattr(module, "create", create)
    monkeypatch.setattr(module, "install", lambda pip_arguments: None)
    yield module


def make(clone: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", *arguments],
        cwd=clone,
        env={**CLEAN, **environment},
        capture_output=True,
        text=True,
    )


def test_an_environment_is_made_once(
    installer: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    installer.main([])
    said = capsys.readouterr().err
    assert "making .venv with the versions of requirements.lock" in said
    assert "torch.compile for the CPU fails under a path with spaces; move the clone" in said
    made = installer.STAMP.stat().st_mtime_ns
    installer.main([])
    assert installer.STAMP.stat().st_mtime_ns == made
    assert capsys.readouterr().err == ""


def test_an_interrupted_install_is_noticed_and_made_anew(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    complete = installer.install

    def interrupted(pip_arguments: list[str]) -> None:
        (installer.ENVIRONMENT / "half-made").write_text("")
        raise KeyboardInterrupt

    monkeypatch.setattr(installer, "install", interrupted)
    with pytest.raises(KeyboardInterrupt):
        installer.main([])
    monkeypatch.setattr(installer, "install", complete)
    capsys.readouterr()
    installer.main([])
    assert ".venv is half-made (an earlier install was interrupted); making .venv anew" in (
        capsys.readouterr().err
    )
    assert not (installer.ENVIRONMENT / "half-made").exists()
    assert installer.why_rebuild() is None


def test_pip_failing_leaves_no_stamp(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(installer, "install", lambda pip_arguments: installer.run(["false"]))
    with pytest.raises(SystemExit, match=r"'false' ended with status 1"):
        installer.main([])
    assert installer.why_rebuild() == ".venv is half-made (an earlier install was interrupted)"


def test_other_pins_another_folder_and_a_vanished_python(
    installer: ModuleType, clone: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installer.main([])
    with installer.LOCK.open("a") as lock:
        lock.write("another==1.0\n")
    assert installer.why_rebuild() == (
        ".venv was made for other pins, another Python or another folder"
    )
    installer.main([])
    monkeypatch.setattr(installer, "CLONE", clone.parent / "moved")
    assert installer.why_rebuild() is not None
    monkeypatch.setattr(installer, "CLONE", clone)
    assert installer.why_rebuild() is None
    (installer.ENVIRONMENT / "bin" / "python").unlink()
    (installer.ENVIRONMENT / "bin" / "python").symlink_to("/no/such/python")
    assert installer.why_rebuild() == ".venv has no working Python"


def test_no_compiler_is_one_sentence_and_makes_nothing(clone: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools only"
    tools.mkdir()
    for name in ("make", "sh", "echo", "test"):
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    environment = {"PATH": str(tools), "CXX": ""}
    done = make(clone, "install", f"PYTHON={sys.executable}", **environment)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "install: no C++ compiler found (looked for g++, c++, clang++); get one with "
        "'sudo apt install g++' or 'sudo dnf install gcc-c++'."
    )
    assert not (clone / ".venv").exists()

    done = make(clone, "install", **environment)  # and no Python on PATH either
    assert done.stderr.startswith(
        "install: no Python 3.11 or newer found; install one, or call make"
    )


def test_no_ensurepip_is_one_sentence(clone: Path, tmp_path: Path) -> None:
    (tmp_path / "ensurepip.py").write_text(
        "raise ImportError('No module named ensurepip', name='ensurepip')\n"
    )
    done = make(clone, "install", f"PYTHON={sys.executable}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "install: this Python has no 'ensurepip', which makes .venv; get it with "
        "'sudo apt install python3-venv', or call make PYTHON=/path/to/another/python3."
    )


def test_an_old_python_is_one_sentence(
    installer: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 12, "final", 0))
    with pytest.raises(SystemExit, match=r"Python 3\.10 is too old, 3\.11 or newer is needed"):
        installer.main([])


def test_demo_passes_a_path_with_spaces_and_quotes(installer: ModuleType, clone: Path) -> None:
    installer.main([])
    python = installer.ENVIRONMENT / "bin" / "python"
    python.unlink()
    python.write_text('#!/bin/sh\nfor argument; do echo "<$argument>"; done\n')
    python.chmod(0o755)
    pinned = f"PYTHON={sys.executable}"
    done = make(clone, "demo", pinned, 'DATA=/data/it\'s "day" 0.tsv')
    lines = done.stdout.splitlines()
    data = ["<--data>", '</data/it\'s "day" 0.tsv>']
    assert lines[:6] == ["<-m>", "<fuselab>", "<study>", "<dlrm>", "<-o>", "<fuselab-study>"]
    assert lines[6:11] == [*data, "<-m>", "<fuselab>", "<train>"]
    trained = [*data, "<-m>", "<fuselab>", "<predict>", "<fuselab-study/trained>"]
    assert trained in [lines[at : at + len(trained)] for at in range(len(lines))]
    assert lines[-1].startswith(f"The report lies in {clone}/fuselab-study/report.html")
    assert "<--data>" not in make(clone, "demo", pinned).stdout
