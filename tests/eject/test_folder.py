"""A package's folder on a full disk: one sentence, and nothing half-written."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from fuselab.ejection.folder import copy_package, is_intact, write_folder
from fuselab.errors import OutputError

FILES = {"op.py": "1\n", "inner/kernel.py": "2\n"}
FULL = "the disk is full; free some space or choose another folder."


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse the text of every file named kernel.py, after it was opened."""
    write = Path.write_text

    def refused(path: Path, *args: str, **kwargs: str) -> int:
        if "kernel.py" not in path.name:
            return write(path, *args, **kwargs)
        write(path, "")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", refused)


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def test_a_full_disk_is_said_and_leaves_what_was_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_folder(tmp_path / "old", FILES, {})
    copy_package(tmp_path / "old", tmp_path / "copy")
    assert is_intact(tmp_path / "copy")
    before = names(tmp_path)
    fill_the_disk(monkeypatch)
    for target, force in (("new", False), ("old", True)):
        with pytest.raises(OutputError) as refusal:
            write_folder(tmp_path / target, FILES, {}, force)
        assert str(refusal.value) == f"cannot write {tmp_path / target}: {FULL}"
        assert names(tmp_path) == before
    for target in ("copy", "another"):
        with pytest.raises(OutputError) as refusal:
            copy_package(tmp_path / "old", tmp_path / target)
        assert str(refusal.value) == f"cannot write {tmp_path / target}: {FULL}"
        assert names(tmp_path) == before and is_intact(tmp_path / "copy")
