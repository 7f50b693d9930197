"""Read the original DLRM's processed ``.npz``: ``X_int`` [n, 13], ``X_cat`` [n, 26], ``y`` [n].

The original writes ``X_cat`` column by column and as float64, compressed, so its rows cannot be
streamed from the archive. The three arrays are unpacked once into unnamed files in the temporary
folder ($TMPDIR; 9.6 GB for the Kaggle set) and mapped from there. Its ids are already places in a
vocabulary, with 0 for missing ones.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy
import numpy.typing

from fuselab.data.layout import (
    DENSE_COLUMNS,
    FOR_PREDICT,
    MISSING_LABEL,
    SPARSE_COLUMNS,
    Rows,
    column_name,
)
from fuselab.data.rejects import Rejects
from fuselab.errors import DataError, FuselabError, MissingDataError, OutputError

_WIDTHS = {"X_int": (DENSE_COLUMNS,), "X_cat": (SPARSE_COLUMNS,), "y": ()}
_PIECE_ROWS = 16_384
Array = numpy.typing.NDArray[Any]


def has_labels(path: Path) -> bool:
    with _archive(path) as archive:
        return "y.npy" in archive.namelist()


def parts(path: Path, part_bytes: int, labelled: bool) -> list[tuple[int, int]]:
    """Return one part, since unpacking the archive for every part would take longer than reading
    it."""
    return [(0, count_rows(path, Rejects(), labelled))]


def count_rows(path: Path, rejects: Rejects, labelled: bool) -> int:
    with _opened(path, labelled) as members:
        return _check(path, {name: _header(file)[0] for name, file in members.items()})


def read_part(
    path: Path, start: int, stop: int, rejects: Rejects, labelled: bool
) -> Iterator[Rows]:
    """Yield the rows from ``start`` to ``stop``."""
    with contextlib.ExitStack() as closing:
        arrays: dict[str, Array] = {}
        with _opened(path, labelled) as members:
            for name, file in members.items():
                arrays[name] = _unpacked(closing, path, file)
        _check(path, {name: array.shape for name, array in arrays.items()})
        for first in range(start, stop, _PIECE_ROWS):
            window = slice(first, min(first + _PIECE_ROWS, stop))
            pieces = {name: numpy.asarray(array[window]) for name, array in arrays.items()}
            yield _rows(path, pieces, first, rejects)


@contextlib.contextmanager
def _opened(path: Path, labelled: bool) -> Iterator[dict[str, IO[bytes]]]:
    """Yield the archive's arrays as open files by name, at their beginnings."""
    with _archive(path) as archive, contextlib.ExitStack() as closing:
        members = {}
        for name in _WIDTHS:
            if name == "y" and not labelled:
                continue
            if f"{name}.npy" not in archive.namelist():
                raise DataError(
                    f"{path} has no array '{name}'; expected X_int, X_cat and y."
                    + (f" {FOR_PREDICT}" if name == "y" else "")
                )
            members[name] = closing.enter_context(archive.open(f"{name}.npy"))
        yield members


@contextlib.contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open the archive; errors in the block become DataError."""
    try:
        with zipfile.ZipFile(path) as archive:
            yield archive
    except FileNotFoundError:
        raise MissingDataError(f"no file '{path}'; give the path of a Criteo file.") from None
    except FuselabError:
        raise
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise DataError(f"{path} is not a whole .npz ({error}); fetch it again.") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, numpy.dtype[Any]]:
    version = numpy.lib.format.read_magic(file)
    if version == (1, 0):
        return numpy.lib.format.read_array_header_1_0(file)
    return numpy.lib.format.read_array_header_2_0(file)


def _unpacked(closing: contextlib.ExitStack, path: Path, file: IO[bytes]) -> Array:
    shape, by_column, dtype = _header(file)
    if dtype.kind not in "biuf":
        raise DataError(f"{path} holds an array of {dtype}; expected numbers.")
    try:
        unpacked = closing.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 - entered
        shutil.copyfileobj(file, unpacked, 1 << 20)
        unpacked.flush()
    except OSError as error:
        raise OutputError(
            f"{path} cannot be unpacked: {error.strerror or error}; set TMPDIR to a folder with "
            "more space."
        ) from error
    order = "F" if by_column else "C"
    if unpacked.tell() != dtype.itemsize * int(numpy.prod(shape)):
        raise DataError(f"{path} holds an array that stops short; fetch it again.")
    if not unpacked.tell():  # an empty file cannot be mapped
        return numpy.empty(shape, dtype)
    mapped: numpy.typing.NDArray[Any] = numpy.memmap(  # type: ignore[call-overload]
        unpacked, dtype, "r", shape=shape, order=order
    )
    return mapped


def _check(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    rows = shapes["X_int"][0] if shapes["X_int"] else 0
    for name, shape in shapes.items():
        expected = (rows, *_WIDTHS[name])
        if shape != expected:
            raise DataError(
                f"{path}: '{name}' has shape {shape}; expected {expected}, as 'X_int' has {rows} "
                "rows."
            )
    if not rows:
        raise DataError(f"{path} holds no row.")
    return rows


def _rows(path: Path, pieces: dict[str, Array], first: int, rejects: Rejects) -> Rows:
    labelled = "y" in pieces
    labels = pieces["y"] if labelled else numpy.zeros(len(pieces["X_int"]))
    fields = numpy.concatenate(
        [labels[:, None], pieces["X_int"], pieces["X_cat"]], axis=1, dtype=numpy.float64
    )
    whole = numpy.isfinite(fields) & (fields == numpy.floor(fields))
    whole[:, 0] &= (fields[:, 0] == 0) | (fields[:, 0] == 1)
    good = whole.all(axis=1)
    for row in numpy.flatnonzero(~good).tolist():
        column = int(numpy.flatnonzero(~whole[row])[0])
        expected = "an integer" if column else "0 or 1"
        rejects.malformed(
            f"{path}, row {first + row + 1}, column {column + 1} ({column_name(column)}): "
            f"found {fields[row, column]:g}; expected {expected}."
        )
    integers = fields[good].astype(numpy.int64)
    if not labelled:
        integers[:, 0] = MISSING_LABEL
    dense, sparse = 1, 1 + DENSE_COLUMNS
    return Rows(integers[:, 0].astype(numpy.uint8), integers[:, dense:sparse], integers[:, sparse:])
