"""Data at a URL (``s3://``, ``gs://``, ``https://``, whatever fsspec opens): local copies of it.

Training reads rows in an order of its own, every epoch anew, which an object store answers slowly.
So a file is fetched whole, once, into fuselab's cache, and fetched again when the store says that
it has changed.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import fsspec

from fuselab.errors import ArgumentError, DataError, MissingDataError
from fuselab.report.progress import say
from fuselab.runtime import cache

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[A-Za-z0-9+.-]+)*://")
_INDEX = ".index.json"  # the version of each file of a copy, as the store names it
_LOUD_BYTES = 1 << 20  # a file of fewer is fetched without a word


def is_url(path: str | Path) -> bool:
    """Return whether ``path`` names data by a URL."""
    return isinstance(path, str) and _URL.match(path) is not None


def refuse_url(folder: str | Path) -> None:
    """Raise ArgumentError for a folder to write that is a URL, also where Path has taken a slash
    away."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(folder)):
        raise ArgumentError(f"'{folder}' is a URL; give a folder of this machine to write.")


def local(path: str | Path) -> Path:
    """Return the local path of the data at ``path``: itself, or the copy of a URL's.

    The copy of a file is a file, that of a folder or of a glob a folder with its files. A process
    asks the store once for each URL; processes of one machine share the copies in the cache.

    Raises:
        MissingDataError: the URL names nothing.
        DataError: no package that opens such URLs is installed, the store cannot be reached or
            refuses, or the copy cannot be written.
    """
    return _copied(path) if isinstance(path, str) and is_url(path) else Path(path)


@functools.cache
def _copied(url: str) -> Path:
    with _told_by(url):
        store, place = fsspec.core.url_to_fs(url)
        is_file, found = _files(store, place)
    if not found:
        raise MissingDataError(
            f"nothing is at '{url}'; give the URL of a file, a folder or a glob."
        )
    root = cache.folder() / "data" / hashlib.sha256(url.encode()).hexdigest()[:16]
    with _told_by(url):
        root.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(root / ".lock"):
            _update(store, found, root, url)
    return root / next(iter(found)) if is_file else root


def _files(store: Any, place: str) -> tuple[bool, dict[str, str]]:
    """Return whether the place is one file, and the places of the files there by their names."""
    if store.isfile(place):
        return True, {place.rsplit("/", 1)[-1]: place}
    if any(sign in place for sign in "*?["):
        listed = store.glob(place)
    else:
        listed = store.ls(place, detail=False) if store.isdir(place) else []
    files = {str(one).rsplit("/", 1)[-1]: str(one) for one in listed if store.isfile(one)}
    if len(files) < sum(map(store.isfile, listed)):
        raise DataError(
            f"'{place}' names files of one name in several folders; give a folder each."
        )
    return False, files


def _update(store: Any, found: Mapping[str, str], root: Path, url: str) -> None:
    """Make the files below ``root`` those of the store."""
    index = root / _INDEX
    held: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        held = dict(json.loads(index.read_text(encoding="utf-8")))
    for name in sorted(set(held) - set(found)):
        (root / name).unlink(missing_ok=True)
        del held[name]
    for name, place in sorted(found.items()):
        version, size = str(store.ukey(place)), store.size(place)
        target = root / name
        if held.get(name) == version and target.is_file():
            continue
        if size is None or size >= _LOUD_BYTES:
            extent = "" if size is None else f" ({size / 1e6:.3g} MB)"
            say(f"fuselab: fetching {name}{extent} of {url}, once: it is kept in {root}.")
        held.pop(name, None)
        part = root / f".{name}.part"
        try:
            store.get_file(place, str(part))
            _keep_time(store, place, part)
            os.replace(part, target)
        finally:
            part.unlink(missing_ok=True)
        held[name] = version
        index.write_text(json.dumps(held, indent=1), encoding="utf-8")
    index.write_text(json.dumps(held, indent=1), encoding="utf-8")


def _keep_time(store: Any, place: str, file: Path) -> None:
    """Give a copy the time of its original, by which a resumed run knows its source."""
    with contextlib.suppress(Exception):  # not every store knows the time
        seconds = store.modified(place).timestamp()
        os.utime(file, (seconds, seconds))


@contextlib.contextmanager
def _told_by(url: str) -> Iterator[None]:
    """Turn what a store's library raises, which may be of any class, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except FileNotFoundError:
        raise MissingDataError(f"nothing is at '{url}'; give the URL of a file.") from None
    except ImportError as error:
        raise DataError(f"'{url}' cannot be opened: {_first_line(error)}.") from error
    except Exception as error:
        free = shutil.disk_usage(cache.folder()).free
        said = _first_line(error)
        if free < _LOUD_BYTES:
            said += f", and {cache.folder()} has {free} bytes left (FUSELAB_CACHE names another)"
        raise DataError(f"'{url}' cannot be read: {type(error).__name__}: {said}.") from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")
