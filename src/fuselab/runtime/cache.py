"""The disk cache of compiled kernels: one file per key, written atomically, compiled once.

The folder is ``$FUSELAB_CACHE``, else ``$XDG_CACHE_HOME/fuselab``, else ``~/.cache/fuselab``. It
may be deleted at any time.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

from fuselab.errors import BuildError
from fuselab.runtime.compiler import run_command

POLL_S = 0.01  # between two looks at a lock that another process holds
HEADERS = Path(__file__).with_name("include")  # public: any kernel may include them by name
_STANDARD_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>", re.MULTILINE)
_LOCAL_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)


def folder() -> Path:
    """Return the cache folder, which is created if needed; a temporary folder, with one warning, if
    it cannot be written."""
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


def slug(device: str) -> str:
    """Return the name of a device as files are called: ``nvidia-h200``."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def key(*parts: object) -> str:
    """Return the sha256 of the parts, each with its length, so that different lists differ."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part if isinstance(part, bytes) else str(part).encode()
        digest.update(b"%d:" % len(encoded))
        digest.update(encoded)
    return digest.hexdigest()


def included(text: str) -> list[str]:
    """Return the names of the headers of ours that a C++ or CUDA text includes."""
    return _LOCAL_INCLUDE.findall(text)


def standard_headers(text: str) -> set[str]:
    """Return the names of the headers of the compiler that a C++ text includes."""
    return set(_STANDARD_INCLUDE.findall(text))


def source_text(path: Path, headers: Path | None = None) -> str:
    """Return the file's text, followed by that of every header of ours that it includes, at any
    depth. That is all source that a compiled kernel depends on, in a fixed order.

    A header is beside the file that includes it, else beside the first file, else in ``headers``:
    the folders that the compiler is given for includes.
    """
    seen: dict[Path, str] = {}
    root = path.resolve().parent

    def visit(file: Path) -> None:
        if file in seen:
            return
        seen[file] = text = file.read_text()
        for name in included(text):
            for folder in filter(None, (file.parent, root, headers)):
                header = (folder / name).resolve()
                if header.is_file():
                    visit(header)
                    break

    def named(file: Path) -> str:
        # A public header has one name, wherever the file lies that includes it.
        is_public = headers is not None and file.parent == headers.resolve()
        return file.name if is_public else os.path.relpath(file, root)

    visit(path.resolve())
    return "\n".join(f"// {named(file)}\n{text}" for file, text in seen.items())


def _entry(folder: Path, key: str, suffix: str) -> Path:
    return folder / key[:2] / f"{key[2:]}{suffix}"


def holds(key: str, suffix: str) -> bool:
    """Return whether ``fetch`` would find the file of ``key``, without creating a folder."""
    return _entry(_chosen(), key, suffix).exists()


def fetch(key: str, suffix: str, build: Callable[[Path], None]) -> Path:
    """Return the file of ``key``. If it is missing, ``build(path)`` writes it, under a lock that
    other processes wait for, and the file appears atomically. Raises BuildError if it cannot be
    written, and whatever ``build`` raises."""

    def publish(new: Path, file: Path, lock: int) -> None:
        build(new)
        os.replace(new, file)

    return _fetch(key, suffix, publish)


def fetch_by_command(
    key: str,
    suffix: str,
    command: Callable[[Path], Sequence[str]],
    check: Callable[[subprocess.CompletedProcess[str]], None],
) -> Path:
    """Return the file of ``key``; on a miss ``command(path)``, run as a process, writes it.

    If this process ends meanwhile, the command continues, keeps the lock and publishes the file.
    ``check`` raises for a command that has failed. Raises the errors of ``fetch``.
    """

    def publish(new: Path, file: Path, lock: int) -> None:
        shell = ["sh", "-c", _PUBLISH, "sh", str(new), str(file), *command(new)]
        # A file, not a pipe: a pipe's reader waits for every process that was forked meanwhile.
        with tempfile.TemporaryFile("w+") as log:
            nothing = subprocess.DEVNULL
            done = run_command(shell, stdin=nothing, stdout=nothing, stderr=log, pass_fds=(lock,))
            log.seek(0)
            done.stderr = log.read()
            check(done)

    return _fetch(key, suffix, publish)


# $1 is the new file, $2 the published one, the rest the command.
_PUBLISH = """
new=$1 file=$2; shift 2
if "$@"; then mv -f "$new" "$file"; else status=$?; rm -f "$new"; exit $status; fi
"""


def _fetch(key: str, suffix: str, publish: Callable[[Path, Path, int], None]) -> Path:
    """Return the file of ``key``. If it is missing, ``publish(new, file, lock)`` writes a new file
    and moves it to its place, while the lock with that file handle is held."""
    file = _entry(_chosen(), key, suffix)
    if file.exists():  # this works in a read-only folder too
        return file
    file = _entry(folder(), key, suffix)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with locked(file.with_name(file.name + ".lock")) as lock:
            if not file.exists():
                handle, name = tempfile.mkstemp(dir=file.parent, prefix=".new-", suffix=file.suffix)
                os.close(handle)
                try:
                    publish(Path(name), file, lock)
                except BaseException:
                    Path(name).unlink(missing_ok=True)
                    raise
    except OSError as error:
        raise BuildError(
            f"a compiled kernel cannot be kept in {file.parent} ({error.strerror}); free some "
            "space, or set FUSELAB_CACHE to another folder."
        ) from error
    return file


@contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock between processes (and between threads), and yield its file handle. A
    process that inherits the handle shares the lock. The file is removed afterwards."""
    lock = FileLock(path)
    with lock.acquire(poll_interval=POLL_S):
        # filelock hands the handle out in its newest versions only; torch brings older ones too.
        handle = lock._context.lock_file_fd
        assert handle is not None
        try:
            yield handle
        finally:
            path.unlink()
