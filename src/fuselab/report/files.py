"""Write a result whole or not at all: a temporary file in the same folder, fsync, rename.

``write_text``, ``write_bytes`` and ``write_json`` take a finished value; ``replacing`` is for
libraries that write the file themselves (plots, traces, parquet). Every error of the disk becomes
one ``OutputError`` that says what to do. No half-written or temporary file is left, and a file that
was there before stays as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import numbers
import os
import secrets
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fuselab.errors import OutputError


def check_destination(path: str | os.PathLike[str]) -> None:
    """Raise OutputError if a file could not be written to ``path``.

    The reasons are a missing folder, a folder or a read-only file at ``path``, or no permission. A
    full disk is noticed only by the write itself.
    """
    file = Path(path)
    if file.is_dir():
        raise OutputError(f"{file} is a folder; name a file in it.")
    if file.parent.exists() and not file.parent.is_dir():
        raise OutputError(f"cannot write {file}: {file.parent} is a file; choose another place.")
    if not file.parent.is_dir():
        raise OutputError(f"cannot write {file}: the folder {file.parent} does not exist; make it.")
    if not os.access(file.parent, os.W_OK):
        raise OutputError(f"cannot write {file}: {_forbidden(file.parent)}")
    _check_not_read_only(file)


def _check_not_read_only(file: Path) -> None:
    """Raise OutputError if ``file`` is read-only.

    A rename would replace it all the same, and root may write to a file without any write
    permission.
    """
    if not file.is_file():
        return
    if not os.access(file, os.W_OK) or not file.stat().st_mode & _WRITABLE:
        raise OutputError(f"cannot write {file}: that file is read-only; give another name.")


_WRITABLE = stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise OutputError if ``folder_for_results`` could not make or fill ``path``; create nothing.

    A full disk is noticed only by the write itself.
    """
    nearest = _nearest(path)
    if not nearest.is_dir():
        raise OutputError(f"cannot write in {path}: {nearest} is a file; give a folder.")
    if not os.access(nearest, os.W_OK):
        raise OutputError(f"cannot write in {path}: {_forbidden(nearest)}")


def _nearest(folder: str | os.PathLike[str]) -> Path:
    """Return the folder if it exists, otherwise the nearest existing one above it."""
    whole = Path(os.path.abspath(folder))
    return next(each for each in (whole, *whole.parents) if os.path.lexists(each))


def _forbidden(folder: Path) -> str:
    return f"no permission to write in {os.path.abspath(folder)}; choose another folder."


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8. Raises OutputError."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Write ``data``. Raises OutputError."""
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_json(path: str | os.PathLike[str], payload: Mapping[str, Any]) -> None:
    """Write ``payload`` as JSON, spelt as ``json_text`` does. Raises OutputError."""
    write_text(path, json_text(payload))


def json_text(payload: Mapping[str, Any]) -> str:
    """Return ``payload`` as indented JSON that strict parsers read.

    Finite floats keep every digit (the shortest text that reads back as the same float). JSON has
    no spelling for the others: they become the strings "NaN", "Infinity" and "-Infinity", which
    both Python's ``float()`` and JavaScript's ``Number()`` read; null always means "there is no
    value". Dataclasses become objects, tuples and sets (sorted) lists, paths strings; anything else
    raises TypeError naming its place.
    """
    return json.dumps(_plain(payload, "payload"), indent=2, ensure_ascii=False) + "\n"


def _plain(value: Any, place: str) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return _plain_float(float(value))
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise TypeError(f"{place}: the keys of a JSON object are strings")
        return {key: _plain(item, f"{place}.{key}") for key, item in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value)
    if isinstance(value, Collection) and not isinstance(value, bytes | bytearray):
        return [_plain(item, f"{place}[{index}]") for index, item in enumerate(value)]
    raise TypeError(f"{place}: a {type(value).__name__} has no JSON spelling; convert it first")


def _plain_float(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


@contextlib.contextmanager
def folder_for_results(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Create the folder with its parents, and check that it is writable before minutes of work.

    Yields the folder. If the block raises, the folders created here are removed again if they are
    empty. Raises OutputError.
    """
    folder = Path(path)
    made = [each for each in (folder, *folder.parents) if not os.path.exists(each)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except FileExistsError as error:
        raise OutputError(f"{folder} is a file; give a folder.") from error
    except OSError as error:
        problem = reason(error, _nearest(folder) / "_")
        raise OutputError(f"cannot write in {folder}: {problem}") from error
    try:
        yield folder
    except BaseException:
        with contextlib.suppress(OSError):
            for each in made:
                each.rmdir()
        raise


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path, of the same suffix, that replaces ``path`` when the block ends.

    A symbolic link keeps its place and its target is replaced. A device or pipe (``/dev/stdout``)
    is written directly. Raises OutputError; if the block raises anything, ``path`` is untouched.
    """
    wanted = Path(path)
    target = Path(os.path.realpath(wanted))
    try:
        if target.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if target.exists() and not target.is_file():
            yield target
            return
        _check_not_read_only(target)
        temporary = target.with_name(f".fuselab-{secrets.token_hex(6)}{target.suffix}")
        # Not made by tempfile, so that the result has the permissions of the user's umask.
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
        try:
            yield temporary
            _flush_to_disk(temporary)
            os.replace(temporary, target)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OutputError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write {wanted}: {reason(error, wanted)}") from error


def _flush_to_disk(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def reason(error: OSError, path: Path) -> str:
    match error.errno:
        case errno.ENOSPC | errno.EDQUOT:
            return "the disk is full; free some space or choose another folder."
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return _forbidden(path.parent)
        case errno.ENOENT:
            if path.parent.is_dir():
                return f"{path.parent} takes no new files; choose another folder."
            return f"the folder {path.parent} does not exist; make it first."
        case errno.ENOTDIR:
            return f"{path.parent} is not a folder; choose another place."
        case errno.EISDIR:
            return "it is a folder; give a file name."
        case _:
            return f"{(error.strerror or str(error)).lower()}; choose another place."
