"""Write a package's files to a folder: whole or not at all, and never over a person's edits.

``manifest.json`` has the SHA-256 of every file as it was written. A file whose hash differs was
edited by hand.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuselab.errors import EjectError, OutputError
from fuselab.report.files import reason

MANIFEST = "manifest.json"


def write_folder(
    folder: Path, files: Mapping[str, str], about: Mapping[str, Any], force: bool = False
) -> list[str]:
    """Write ``files`` to ``folder`` and return the names of those kept because of edits.

    Args:
        folder: does not exist; with ``force`` it may be a package that was ejected earlier.
        files: the text of each file by its name; a file of a package in it as ``NAME/file``.
        about: facts for the manifest: versions, the function.
        force: True replaces the files as they were written. Beside a file edited since then the
            new one is written as ``NAME.new``.

    Raises:
        EjectError: the folder exists and ``force`` is False, or it is no ejected package.
        OutputError: the disk refuses.
    """
    check_folder(folder, force)
    texts = dict(files)
    manifest = {**about, "files": {name: _hash(text) for name, text in files.items()}}
    texts[MANIFEST] = json.dumps(manifest, indent=2) + "\n"
    try:
        return _replaced(folder, texts) if folder.exists() else _created(folder, texts)
    except OSError as error:
        raise OutputError(f"cannot write {folder}: {reason(error, folder)}") from error
    finally:
        importlib.invalidate_caches()  # so that this process can import it at once


def check_folder(folder: Path, force: bool) -> None:
    """Raise EjectError if ``write_folder`` would refuse the folder."""
    if not folder.exists():
        return
    if not force:
        raise EjectError(f"{folder} exists; name a folder that does not, or give --force.")
    if not (folder / MANIFEST).is_file():
        raise EjectError(f"{folder} is no ejected package (it has no {MANIFEST}); name another.")


def edited(folder: Path) -> list[str]:
    """Return the names of the files that differ from what was written, in order."""
    hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    return [
        name
        for name, written in hashes.items()
        if (folder / name).is_file() and _hash((folder / name).read_text("utf-8")) != written
    ]


def is_intact(folder: Path) -> bool:
    """Return whether a folder is a package with all its files, each as it was written."""
    try:
        hashes = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return all(
            _hash((folder / name).read_text(encoding="utf-8")) == written
            for name, written in hashes.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def copy_package(folder: Path, target: Path) -> None:
    """Copy a package. An earlier copy is replaced, but stays if a file in it was edited by hand.
    Raises OutputError, and leaves what was there before."""
    if target.exists() and not is_intact(target):
        return
    texts = {
        str(file.relative_to(folder)): file.read_text(encoding="utf-8")
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    try:
        fresh = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        _created(fresh, texts)
        shutil.rmtree(target, ignore_errors=True)
        fresh.rename(target)
    except OSError as error:
        raise OutputError(f"cannot write {target}: {reason(error, target)}") from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _created(folder: Path, texts: Mapping[str, str]) -> list[str]:
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    try:
        draft.mkdir()
        for name, text in texts.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_text(text, encoding="utf-8")
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return []


def _replaced(folder: Path, texts: Mapping[str, str]) -> list[str]:
    kept = edited(folder)
    for name, text in texts.items():
        target = folder / (f"{name}.new" if name in kept else name)
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            draft.write_text(text, encoding="utf-8")
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)
    return kept
