"""The disk cache of compiled kernels: one file per key, published whole, compiled once.

The folder is ``$FUSELAB_CACHE``, else ``$XDG_CACHE_HOME/fuselab``, else ``~/.cache/fuselab``. It
may be deleted at any time.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import os
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fuselab.errors import BuildError

_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def folder() -> Path:
    """The cache folder, made if need be; a temporary one, with one warning, if it cannot be
    written."""
    return _writable(_chosen())


def _chosen() -> Path:
    if chosen := os.environ.get("FUSELAB_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "fuselab"


@functools.cache
def _writable(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        temporary = Path(tempfile.mkdtemp(prefix="fuselab-cache-"))
        warnings.warn(
            f"the cache folder {path} cannot be written ({error.strerror}); kernels are compiled "
            f"again in every process. Set FUSELAB_CACHE to a writable folder. Using {temporary}.",
            stacklevel=2,
        )
        return temporary


def key(*parts: object) -> str:
    """sha256 of the parts, each with its length, so that no two lists of parts run together."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part if isinstance(part, bytes) else str(part).encode()
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


def source_text(path: Path) -> str:
    """The file's text followed by that of every local header it includes, at any depth: all of
    the source that a compiled kernel depends on, in a fixed order."""
    seen: dict[Path, str] = {}

    def visit(file: Path) -> None:
        if file in seen:
            return
        seen[file] = text = file.read_text()
        for name in _LOCAL_INCLUDE.findall(text):
            header = (file.parent / name).resolve()
            if header.is_file():
                visit(header)

    visit(path.resolve())
    root = path.resolve().parent
    return "\n".join(f"// {os.path.relpath(file, root)}\n{text}" for file, text in seen.items())


def _entry(folder: Path, key: str, suffix: str) -> Path:
    return folder / key[:2] / f"{key[2:]}{suffix}"


def holds(key: str, suffix: str) -> bool:
    """Whether ``fetch`` would find the file of ``key``; makes no folder."""
    return _entry(_chosen(), key, suffix).exists()


def fetch(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """The file of ``key``; on a miss ``build(path)`` writes it, under a lock that other processes
    wait for, and it appears in one step. Raises BuildError where it cannot be written, and what
    ``build`` raises."""
    file = _entry(_chosen(), key, suffix)
    if file.exists():  # also in a folder that can only be read
        return file
    file = _entry(folder(), key, suffix)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(file.name + ".lock")):
            if not file.exists():
                _build(file, build)
    except OSError as error:
        raise BuildError(
            f"a compiled kernel cannot be kept in {file.parent} ({error.strerror}); free some "
            "space, or set FUSELAB_CACHE to another folder."
        ) from error
    return file


def _build(file: Path, build: Callable[[Path], None]) -> None:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-", suffix=file.suffix)
    os.close(handle)
    try:
        build(Path(name))
        os.replace(name, file)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes (and between threads); the file goes afterwards."""
    while True:
        handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
        fcntl.flock(handle, fcntl.LOCK_EX)
        # The holder before us removes the file: a lock on the removed one excludes nobody.
        try:
            if os.fstat(handle).st_ino == os.stat(path).st_ino:
                break
        except FileNotFoundError:
            pass
        os.close(handle)
    try:
        yield
    finally:
        os.unlink(path)
        os.close(handle)
