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
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
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
    """Return the file's text followed by that of every header of ours it includes, at any depth:
    all of the source that a compiled kernel depends on, in a fixed order.

    A header lies beside the file that includes it, else beside the first one, as for a compiler
    that is given the first one's folder.
    """
    seen: dict[Path, str] = {}
    root = path.resolve().parent

    def visit(file: Path) -> None:
        if file in seen:
            return
        seen[file] = text = file.read_text()
        for name in _LOCAL_INCLUDE.findall(text):
            for folder in (file.parent, root):
                header = (folder / name).resolve()
                if header.is_file():
                    visit(header)
                    break

    visit(path.resolve())
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

    The command goes on, keeps the lock and publishes the file though this process ends meanwhile.
    ``check`` raises for a command that has failed. Raises as ``fetch`` does.
    """

    def publish(new: Path, file: Path, lock: int) -> None:
        shell = ["sh", "-c", _PUBLISH, "sh", str(new), str(file), *command(new)]
        # Not to a pipe: its reader waits for every process that was forked meanwhile.
        with tempfile.TemporaryFile("w+") as log:
            status = subprocess.run(
                shell,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                pass_fds=(lock,),
            ).returncode
            log.seek(0)
            check(subprocess.CompletedProcess(shell, status, stderr=log.read()))

    return _fetch(key, suffix, publish)


# $1 is the new file, $2 the published one, the rest the command.
_PUBLISH = """
new=$1 file=$2; shift 2
if "$@"; then mv -f "$new" "$file"; else status=$?; rm -f "$new"; exit $status; fi
"""


def _fetch(key: str, suffix: str, publish: Callable[[Path, Path, int], None]) -> Path:
    """``publish(new, file, lock)`` writes a new file and moves it to its place, under the lock of
    that file handle."""
    file = _entry(_chosen(), key, suffix)
    if file.exists():  # also in a folder that can only be read
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
    """Hold an exclusive lock between processes (and between threads), and give its file handle: a
    process that inherits it shares the lock. The file goes afterwards."""
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
        yield handle
    finally:
        os.unlink(path)
        # Closing alone does not unlock: a process forked meanwhile holds the same open file.
        fcntl.flock(handle, fcntl.LOCK_UN)
        os.close(handle)
