"""The prepared format: a folder of shards of records, and the manifest that makes it whole.

    manifest.json       written last: without it the folder is an unfinished preparation
    rows-00000.npy ...  records (``fuselab.data.records``), in the source's order; plain .npy
    vocabulary.npz      with a vocabulary: the values of C1 to C26

``numpy.load(shard, mmap_mode="r")`` gives a shard's fields by name, without fuselab.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from fuselab.data import loading, remote
from fuselab.data.dense import Dense
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import DENSE_COLUMNS, SPARSE_COLUMNS
from fuselab.data.metadata import load_vocabulary
from fuselab.data.records import RECORD, WORDS, Records
from fuselab.errors import DataError

MANIFEST = "manifest.json"
PLAN = "plan.json"  # the plan of an unfinished preparation
VOCABULARY = "vocabulary.npz"
SCHEMA = 1
_AGAIN = "prepare the data again, into a new folder."  # preparing into the same folder is refused


@dataclass(frozen=True)
class Shard:
    """One file; its rows start ``offset`` bytes after its beginning."""

    path: Path
    rows: int
    offset: int


class Prepared:
    """An opened folder. Reading is stateless: any rows, from any thread.

    Raises DataError if the manifest is missing, incomplete or of another schema, or if a shard is
    missing or not as long as the manifest says.
    """

    rows_per_read = 4096

    def __init__(self, folder: str | Path) -> None:
        self.folder = remote.local(folder)
        self.manifest = load_manifest(self.folder)
        with _told_by(self.folder / MANIFEST):
            self.cardinalities = tuple(int(size) for size in self.manifest["cardinalities"])
            self.validation_first = int(self.manifest["validation_first"])
            listed = [(str(shard["file"]), int(shard["rows"])) for shard in self.manifest["shards"]]
        if len(self.cardinalities) != SPARSE_COLUMNS:
            raise DataError(
                f"{self.folder / MANIFEST} has {len(self.cardinalities)} cardinalities; expected "
                f"{SPARSE_COLUMNS}; {_AGAIN}"
            )
        # the largest value of each word of a record
        self._largest = numpy.full(WORDS, 2**32 - 1, dtype=numpy.uint32)
        self._largest[-SPARSE_COLUMNS:] = numpy.array(self.cardinalities, dtype=numpy.uint32) - 1
        self.shards = [_open_shard(self.folder / name, rows) for name, rows in listed]
        self._ends = list(itertools.accumulate(shard.rows for shard in self.shards))

    def ids(self) -> Modulus | Vocabulary:
        """Return the mapping of ids to indices, which other rows need for the same model."""
        with _told_by(self.folder / MANIFEST):
            kind = self.manifest["ids"]
        if kind == "vocabulary":
            return load_vocabulary(self.folder / VOCABULARY)
        return Modulus(self.cardinalities)

    def dense(self) -> Dense:
        """Return the transform of the counts."""
        with _told_by(self.folder / MANIFEST):
            return Dense.of(self.manifest["dense"])

    @property
    def rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read_into(self, out: Records, first: int) -> None:
        """Fill ``out`` [n] with the rows from ``first`` on, straight from the files.

        No memory map is used: a read into pinned memory copies once and faults no pages, and a file
        that was cut meanwhile is an error instead of a bus error. Raises DataError for such a file,
        for an id beyond its table and for a label that is not 0 or 1.
        """
        done = 0
        while done < len(out):
            number = bisect.bisect_right(self._ends, first + done)
            shard = self.shards[number]
            start = first + done - (self._ends[number] - shard.rows)
            count = min(len(out) - done, shard.rows - start)
            self._read(shard, out[done : done + count], start)
            done += count

    def _read(self, shard: Shard, out: Records, first: int) -> None:
        """Read rows of one shard.

        The file is opened every time: 5 us are little beside a read, and the limit on open files
        does not matter.
        """
        try:
            with shard.path.open("rb", buffering=0) as file:
                right = _filled(file.fileno(), shard, out, first, self._largest)
        except OSError as error:
            raise DataError(f"{shard.path} cannot be read: {error.strerror or error}.") from error
        if not right:
            _check_labels(shard, out, first)
            self._check_indices(shard, out, first)

    def _check_indices(self, shard: Shard, out: Records, first: int) -> None:
        """Raise DataError for an id beyond its table, as a damaged file may have.

        In PyTorch's embedding such an id would end in a traceback, on a GPU in a lost device. The
        maximum over 32 rows at once takes 7 ns a row; row by row it takes 21, and comparing every
        word with its bound takes 29.
        """
        # as unsigned numbers, negative values are above 2^31
        words = out.view(numpy.uint32).reshape(len(out), WORDS)
        whole = len(out) // 32 * 32
        for part in (words[:whole].reshape(-1, 32 * WORDS), words[whole:]):
            largest = part.max(axis=0, initial=0).reshape(-1, WORDS).max(axis=0)
            if (largest > self._largest).any():
                break
        else:
            return
        beyond = words > self._largest
        row, word = numpy.argwhere(beyond)[0].tolist()
        column = word - DENSE_COLUMNS - 1
        raise DataError(
            f"{shard.path}, row {first + row + 1}: C{column + 1} has {out['sparse'][row, column]}, "
            f"and its table {self.cardinalities[column]} rows; {_AGAIN}"
        )


def _check_labels(shard: Shard, out: Records, first: int) -> None:
    """Raise DataError for a label that is not 0 or 1, which would train silently; takes 2 ns a
    row."""
    labels = out["label"].copy()  # on the strided view the comparisons would take 1.5 times as long
    bad = (labels != 0) & (labels != 1)
    if bad.any():
        row = int(bad.argmax())
        raise DataError(
            f"{shard.path}, row {first + row + 1}: the label is {labels[row]:g}; expected 0 or 1; "
            f"{_AGAIN}"
        )


@contextlib.contextmanager
def _told_by(manifest: Path) -> Iterator[None]:
    """Raise DataError if the block finds that the manifest lacks something."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{manifest} lacks {error}; {_AGAIN}") from error


def is_prepared(path: str | Path) -> bool:
    """Return whether ``path`` is a folder with a manifest or an unfinished preparation."""
    # Path's own is_dir and exists raise if a folder may not be entered.
    return any(os.path.exists(remote.local(path) / name) for name in (MANIFEST, PLAN))


def load_manifest(folder: Path) -> Mapping[str, Any]:
    """Return the manifest as JSON gives it. Raises DataError as ``Prepared`` does."""
    path = folder / MANIFEST
    try:
        manifest = json.loads(path.read_text())
    except FileNotFoundError:
        raise DataError(
            f"{folder} holds no {MANIFEST}: the preparation did not finish; run the same "
            "'fuselab data prepare' again, it continues."
        ) from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if not isinstance(manifest, dict) or schema != SCHEMA:
        raise DataError(
            f"{path} has schema {schema}; this fuselab reads schema {SCHEMA}: use the fuselab that "
            f"wrote it, or {_AGAIN}"
        )
    return manifest


def _open_shard(path: Path, rows: int) -> Shard:
    try:
        with path.open("rb") as file:
            version = numpy.lib.format.read_magic(file)
            read = numpy.lib.format.read_array_header_1_0
            shape, _, dtype = (read if version == (1, 0) else _unknown_version)(file)
            offset = file.tell()
        size = path.stat().st_size
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read ({error}); {_AGAIN}") from error
    if dtype != RECORD or shape != (rows,) or size != offset + rows * RECORD.itemsize:
        raise DataError(
            f"{path} is not the {rows} records that the manifest lists ({size} bytes); {_AGAIN}"
        )
    return Shard(path, rows, offset)


def _filled(
    file: int, shard: Shard, out: Records, first: int, largest: numpy.typing.NDArray[numpy.uint32]
) -> bool:
    """Fill ``out`` with the shard's rows from ``first`` on; return whether they are known to be
    right."""
    offset = shard.offset + first * RECORD.itemsize
    early = f"{shard.path} ends early; {_AGAIN}"
    if loading.compiled():
        problem, number = loading.read_rows(file, offset, out, largest)
        if problem == loading.ENDS_EARLY:
            raise DataError(early)
        if problem == loading.ERRNO:
            raise OSError(number, os.strerror(number))
        return problem == loading.NONE
    view = memoryview(out.view(numpy.uint8).data)
    while len(view):
        got = os.preadv(file, [view], offset)  # at most 2 GiB a call
        if not got:
            raise DataError(early)
        view, offset = view[got:], offset + got
    return False


def _unknown_version(file: object) -> Any:
    raise ValueError("not a .npy file of version 1.0")
