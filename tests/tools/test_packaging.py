"""The pins are complete and exact, and a wheel carries every file that is read at run time."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

CLONE = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(CLONE / "tools"))

import build_wheel  # noqa: E402

PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (CLONE / "requirements.lock").read_text().splitlines()
    exact = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in exact)
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in exact}


def required(name: str, extras: frozenset[str], seen: set[tuple[str, str]]) -> Iterator[str]:
    """Names of all that ``name[extras]`` needs on this machine, direct or not."""
    for line in importlib.metadata.requires(name) or ():
        requirement = Requirement(line)
        for extra in extras or {""}:
            key = (canonicalize_name(requirement.name), extra)
            if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
                continue
            if key not in seen:
                seen.add(key)
                yield key[0]
                yield from required(requirement.name, frozenset(requirement.extras), seen)


def test_torch_and_triton_are_the_tested_ones() -> None:
    assert pins()["torch"] == "2.13.0"
    assert pins()["triton"] == "3.7.1"


def test_everything_installed_for_fuselab_is_pinned_at_its_version() -> None:
    try:
        importlib.metadata.version("fuselab")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("runs from src uninstalled: there is no install to compare with the pins")
    if not importlib.metadata.version("torch").startswith(pins()["torch"]):
        pytest.skip("another torch than the pinned one is installed here, and all that comes along")
    names = set(required("fuselab", frozenset({"", "dev"}), set())) - {"fuselab"}
    installed = {name: importlib.metadata.version(name).split("+")[0] for name in names}
    assert {"torch", "sympy", "pytest", "pluggy", "tensorboard"} <= names
    assert {name: pins().get(name) for name in names} == installed


def test_each_direct_dependency_is_pinned_within_its_range() -> None:
    project = PROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    for requirement in (Requirement(line) for group in groups for line in group):
        if requirement.name != "fuselab":
            assert requirement.specifier.contains(pins()[canonicalize_name(requirement.name)])


def test_a_wheel_from_the_source_archive_carries_every_file_beside_the_python_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clone, scratch = tmp_path / "clone", tmp_path / "scratch"
    clone.mkdir()
    scratch.mkdir()
    for name in ("pyproject.toml", "LICENSE"):
        shutil.copy(CLONE / name, clone / name)
    (clone / "README.md").touch()
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(CLONE / "src", clone / "src", ignore=ignored)
    source = clone / "src"
    files = {path.relative_to(source).as_posix() for path in source.rglob("*.*") if path.is_file()}
    monkeypatch.setattr(build_wheel, "CLONE", clone)
    monkeypatch.setattr(build_wheel, "DIST", clone / "dist")
    carried = set(zipfile.ZipFile(build_wheel.build(scratch)).namelist())
    assert {Path(name).suffix for name in files} >= {".py", ".cu", ".cpp", ".h", ".jinja", ".typed"}
    assert {name for name in files if name.startswith("fuselab/")} - carried == set()


def test_a_build_step_that_fails_says_so(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"^said\nbuild: 'sh -c \.\.\.' ended with status 3\.$"):
        build_wheel.run(["sh", "-c", "echo said; exit 3"], tmp_path, quiet=True)
