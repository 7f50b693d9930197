"""The files at a path (one file, a folder's or a glob's), and one way to read them all."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from fuselab.data import npz, remote, tsv
from fuselab.data.layout import Rows, concatenate
from fuselab.data.prepared import is_prepared
from fuselab.data.rejects import Rejects
from fuselab.errors import DataError, MissingDataError

PART_BYTES = 64 << 20  # bytes of text, about 270,000 rows


class _Format(Protocol):
    """A module that reads one format: ``tsv``, ``parquet`` or ``npz``. Each says what a part's two
    numbers mean."""

    def has_labels(self, path: Path) -> bool: ...

    def parts(self, path: Path, part_bytes: int, labelled: bool) -> list[tuple[int, int]]: ...

    def count_rows(self, path: Path, rejects: Rejects, labelled: bool) -> int: ...

    def read_part(
        self, path: Path, start: int, stop: int, rejects: Rejects, labelled: bool
    ) -> Iterator[Rows]: ...


_PARQUET = (".parquet", ".pq")
_FORMATS = {"": tsv, ".txt": tsv, ".tsv": tsv, ".gz": tsv, ".npz": npz}


@dataclass(frozen=True)
class Part:
    """Some consecutive rows of one file that can be read without the rest of it."""

    file: Path
    start: int
    stop: int
    labelled: bool

    def read(self, rejects: Rejects) -> Iterator[Rows]:
        """Yield its rows in order. Raises DataError; see ``Rejects``."""
        return _format(self.file).read_part(
            self.file, self.start, self.stop, rejects, self.labelled
        )


@dataclass(frozen=True)
class Source:
    """Files of one format, in order: ``day_2`` comes before ``day_10``.

    Files without labels are refused when they are read, unless ``labels_required`` is false.
    """

    path: str
    files: tuple[Path, ...]
    labels_required: bool = True

    @classmethod
    def at(cls, path: str | Path, labels_required: bool = True) -> Source:
        """Return the source of a file, a folder's data files, or the files that a glob matches; of
        a URL, that of its local copy (``fuselab.data.remote``).

        A name that ends in ``.parquet`` or ``.pq`` is parquet, ``.npz`` the original DLRM's,
        ``.gz`` gzipped text; any other file is text. In a folder, files whose names end in none of
        these (or ``.txt``, ``.tsv``, or nothing) or begin with a dot or an underscore are left out.

        Raises DataError if nothing is there, formats are mixed, or a file is there twice.
        """
        root = remote.local(path)
        if is_prepared(root):
            raise DataError(f"'{path}' is prepared already; give the source it was made from.")
        if os.path.isdir(root):  # Path.is_dir raises where a folder above may not be entered
            if not os.access(root, os.R_OK | os.X_OK):
                raise DataError(f"the folder '{path}' may not be read; give one that may.")
            files = [file for file in root.iterdir() if file.is_file() and _is_data(file)]
            if not files:
                raise DataError(
                    f"'{path}' is a folder without data files; expected Criteo's text (plain or "
                    ".gz), .parquet or .npz in it."
                )
        elif os.path.isfile(root):
            files = [root]
        elif os.path.exists(root):
            raise DataError(f"'{path}' is a pipe or a device, which is read once; give a file.")
        elif not glob.has_magic(str(path)):
            raise MissingDataError(f"no file '{path}'; give the path of a Criteo file.")
        else:
            files = [Path(name) for name in glob.glob(str(path)) if Path(name).is_file()]
            if not files:
                raise MissingDataError(
                    f"no file matches '{path}'; give a file, a folder or a glob."
                )
        files.sort(key=_natural)
        if len({_format(file) for file in files}) > 1:
            raise DataError(
                f"'{path}' holds files of several formats, {files[0].name} and others; give a glob "
                "that takes those of one."
            )
        names = [file.with_suffix("") if file.suffix == ".gz" else file for file in files]
        for name in names:
            if names.count(name) > 1:
                raise DataError(
                    f"'{path}' holds {name.name} plain and gzipped: the same rows twice; give a "
                    "glob that takes one of them."
                )
        return cls(str(path), tuple(files), labels_required)

    def identity(self) -> list[dict[str, Any]]:
        """Return names, sizes and times that tell these files, as they are now, from others."""
        found = [(file.name, file.stat()) for file in self.files]
        return [
            {"name": name, "bytes": stat.st_size, "modified_ns": stat.st_mtime_ns}
            for name, stat in found
        ]

    def parts(self, part_bytes: int = PART_BYTES) -> list[Part]:
        """Return parts with all rows, cut where that is cheap. Raises DataError for an empty
        file."""
        return [
            Part(file, start, stop, labelled)
            for file, labelled in self._labelled()
            for start, stop in _format(file).parts(file, part_bytes, labelled)
        ]

    def read(self, rows: int = 16_384, rejects: Rejects | None = None) -> Iterator[Rows]:
        """Yield all rows in order, ``rows`` at a time; only the last piece may be shorter.

        Memory stays at one block and one piece. Raises DataError for malformed rows (see
        ``Rejects``), and for a file without a complete row.
        """
        if rows < 1:
            raise DataError(f"rows per piece is {rows}; it must be at least 1.")
        return regrouped(self._pieces(rejects or Rejects()), rows)

    def _pieces(self, rejects: Rejects) -> Iterator[Rows]:
        for part in self.parts(part_bytes=1 << 62):
            empty = True
            for piece in part.read(rejects):
                empty = empty and not len(piece)
                yield piece
            if empty and not rejects.skip:
                raise tsv.no_rows(part.file)

    def count_rows(self, rejects: Rejects) -> tuple[int, ...]:
        """Return the number of rows of each file, assuming that they are well formed.

        Text is not parsed, except a last line that stops short.
        """
        return tuple(
            _format(file).count_rows(file, rejects, labelled) for file, labelled in self._labelled()
        )

    def _labelled(self) -> Iterator[tuple[Path, bool]]:
        """Yield every file, and whether its rows are read with a label."""
        for file in self.files:
            yield file, self.labels_required or _format(file).has_labels(file)


def regrouped(pieces: Iterable[Rows], rows: int) -> Iterator[Rows]:
    """Yield the same rows, ``rows`` at a time; the last piece may be shorter."""
    held: list[Rows] = []
    count = 0
    for piece in pieces:
        held.append(piece)
        count += len(piece)
        if count >= rows:
            whole = concatenate(held)
            used = count - count % rows
            for start in range(0, used, rows):
                yield whole[start : start + rows]
            held = [whole[used:]] if used < count else []
            count -= used
    if count:
        yield concatenate(held)


def _format(file: Path) -> _Format:
    """Return the module that reads ``file``. Raises MissingDependencyError for parquet without
    pyarrow."""
    if file.suffix in _PARQUET:
        from fuselab.data import parquet

        return cast(_Format, parquet)
    return cast(_Format, _FORMATS.get(file.suffix, tsv))


def _is_data(file: Path) -> bool:
    return file.suffix in (*_FORMATS, *_PARQUET) and file.name[0] not in "._"


def _natural(file: Path) -> list[tuple[int, str]]:
    """Return a sort key in which numbers in the name count as numbers."""
    return [
        (int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", str(file))
    ]
