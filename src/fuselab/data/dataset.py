"""Rows to train on, from prepared, raw or synthetic data, and their two splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from fuselab.data.dense import Dense
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import Rows, last_seventh
from fuselab.data.prepared import Prepared, is_prepared
from fuselab.data.records import Records, fill
from fuselab.data.rejects import Rejects, warn_of_cut
from fuselab.data.source import Source
from fuselab.data.synthetic import CHUNK_ROWS, chunk
from fuselab.errors import ArgumentError, DataError, UnknownNameError

SPLITS = ("train", "validation")


class Reader(Protocol):
    """A reader of any rows of a source as records."""

    @property
    def rows_per_read(self) -> int | None:
        """The number of rows that are worth a separate thread; None if one thread must read all."""
        ...

    def read_into(self, out: Records, first: int) -> None:
        """Fill ``out`` [n] with the rows from ``first`` on."""
        ...


@dataclass(frozen=True)
class Dataset:
    """Some consecutive rows of a source, as indices into tables and transformed counts.

    ``cardinalities`` are the numbers of rows of the 26 tables; every index is below its table's.
    ``open_reader`` makes a reader of the whole source; this dataset is its ``rows`` from ``first``.
    """

    name: str
    rows: int
    cardinalities: tuple[int, ...]
    open_reader: Callable[[], Reader]
    validation_first: int
    first: int = 0

    def split(self, name: str) -> Dataset:
        """Return the rows of ``"train"`` or of ``"validation"``; the two share none.

        Raises UnknownNameError for another name.
        """
        if name not in SPLITS:
            raise UnknownNameError("split", name, SPLITS)
        end = self.first + self.rows
        middle = min(max(self.validation_first, self.first), end)
        first, stop = (self.first, middle) if name == "train" else (middle, end)
        return replace(self, name=f"{self.name} ({name})", first=first, rows=stop - first)


def open_dataset(
    path: str | Path | None = None,
    *,
    ids: Modulus | Vocabulary | None = None,
    dense: Dense | str | None = None,
    rows: int = 1_000_000,
    seed: int = 0,
    labels_required: bool = True,
) -> Dataset:
    """Open the rows at ``path``, or ``rows`` synthetic ones of ``seed`` if it is None.

    ``path`` is a folder that ``fuselab data prepare`` made, or anything that ``Source`` reads (a
    file, a folder, a glob), which is counted once here and then parsed in every epoch; of either
    the URL too, whose files are fetched once (``fuselab.data.remote``). ``ids`` (default
    ``Modulus()``, the Kaggle set's cardinalities) and ``dense`` (a ``Dense`` or its name, default
    ``"log1p"``) say how rows become records; for prepared rows both are fixed.

    Raw files without labels are refused, or, if ``labels_required`` is false, read with NaN for the
    label.

    The validation rows are those that ``prepare`` put aside; of several raw files the last one's;
    otherwise the last seventh.

    Raises DataError if the source is malformed or missing, ArgumentError for ``ids`` or ``dense``
    on prepared rows and for a negative ``rows`` or ``seed``.
    """
    if path is not None and is_prepared(path):
        prepared = Prepared(path)
        if ids is not None or dense is not None:
            raise ArgumentError(
                f"{path} is prepared: its ids and counts are transformed already; prepare the "
                "source again to have them otherwise, or leave 'ids' and 'dense' out."
            )
        cardinalities, boundary = prepared.cardinalities, prepared.validation_first
        return Dataset(str(path), prepared.rows, cardinalities, lambda: prepared, boundary)
    ids = Modulus() if ids is None else ids
    transform = dense if isinstance(dense, Dense) else Dense(dense or "log1p")
    if path is None:
        if rows < 0 or seed < 0:
            raise ArgumentError(f"{rows} rows of seed {seed} were asked for; neither is negative.")
        synthetic = _Synthetic(seed, ids, transform)
        name = f"synthetic rows of seed {seed}"
        return Dataset(name, rows, ids.cardinalities, lambda: synthetic, last_seventh(rows))
    source = Source.at(path, labels_required)
    rejects = Rejects()
    counts = source.count_rows(rejects)
    warn_of_cut(rejects)
    if not sum(counts):
        raise DataError(f"{path} holds no complete row.")
    boundary = sum(counts[:-1]) if len(counts) > 1 else last_seventh(counts[0])

    def reader() -> Reader:
        return _Stream(source, ids, transform)

    return Dataset(str(path), sum(counts), ids.cardinalities, reader, boundary)


class _Synthetic:
    """A reader of synthetic rows, which draws each chunk when it is asked for."""

    rows_per_read = CHUNK_ROWS

    def __init__(self, seed: int, ids: Modulus | Vocabulary, dense: Dense) -> None:
        self.seed, self.ids, self.dense = seed, ids, dense

    def read_into(self, out: Records, first: int) -> None:
        done = 0
        while done < len(out):
            number, start = divmod(first + done, CHUNK_ROWS)
            rows = chunk(self.seed, number)[start : start + len(out) - done]
            fill(out[done : done + len(rows)], rows, self.ids, self.dense)
            done += len(rows)


class _Stream:
    """A reader that parses rows in order.

    Continuing at the end of the last call costs nothing extra; to reach an earlier row, it reads
    the source again from the beginning.
    """

    rows_per_read = None

    def __init__(self, source: Source, ids: Modulus | Vocabulary, dense: Dense) -> None:
        self.source, self.ids, self.dense = source, ids, dense
        self.pieces: Iterator[Rows] = iter(())
        self.left: Rows | None = None
        self.place = -1  # the index of the first row of ``left``

    def read_into(self, out: Records, first: int) -> None:
        if self.place < 0 or first < self.place:
            self.pieces, self.left, self.place = self.source.read(), None, 0
        done = 0
        while done < len(out):
            if self.left is None or not len(self.left):
                self.left = next(self.pieces, None)
                if self.left is None:
                    raise DataError(f"{self.source.path} holds fewer rows than when it was opened.")
            skipped = min(first + done - self.place, len(self.left))
            rows = self.left[skipped : skipped + len(out) - done]
            fill(out[done : done + len(rows)], rows, self.ids, self.dense)
            self.left = self.left[skipped + len(rows) :]
            self.place += skipped + len(rows)
            done += len(rows)
