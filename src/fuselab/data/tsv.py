"""Reads Criteo's tab-separated files: whole blocks at a time, with the exact place of every error.

A block is some megabytes of text that end at a line break. Every step below works on the whole
block in numpy: find the separators, load the eight bytes that end at each field into one 64-bit
word, and turn digits into numbers by three shift-and-mask steps in that word. Only a block that is
malformed is looked at again, to say where, or to halve it until its good lines stand alone.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy
import numpy.typing

from fuselab.data.layout import (
    COLUMNS,
    DENSE_COLUMNS,
    MISSING_COUNT,
    MISSING_ID,
    Rows,
    column_name,
)
from fuselab.data.rejects import Rejects
from fuselab.errors import DataError

BLOCK_BYTES = 2 << 20  # about 8,700 rows; the fastest of 1 to 16 MiB: it stays in a 2-core L2/L3

_LAYOUT = f"{COLUMNS} tab-separated columns (label, 13 integers, 26 hex ids)"
_LONGEST_COUNT = 16  # digits; a count is parsed as two words of eight

# Every byte by what it may be: the value of a hex digit, or one of these.
_BREAK, _TAB, _OTHER = 0xFF, 0xFE, 0xF0
_CLASS = numpy.full(256, _OTHER, dtype=numpy.uint8)
_CLASS[ord("\t")], _CLASS[ord("\n")] = _TAB, _BREAK
for _value, _digit in enumerate("0123456789abcdef"):
    _CLASS[ord(_digit)] = _CLASS[ord(_digit.upper())] = _value

# Keeps the last n bytes of a big-endian word, for n = 0..8.
_LAST_BYTES = numpy.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=numpy.uint64)

Words = numpy.typing.NDArray[numpy.uint64]
Places = numpy.typing.NDArray[numpy.int64]
Bytes = numpy.typing.NDArray[numpy.uint8]


class _BadLineError(Exception):
    """A line of a block, 0-based, and what is wrong with it: ", column 3 (I2): found ..."."""

    def __init__(self, line: int, says: str) -> None:
        self.line, self.says = line, says


def parts(path: Path, part_bytes: int) -> list[tuple[int, int]]:
    """Where the file can be cut: byte ranges of whole lines, each of about ``part_bytes``.

    A ``.gz`` is one part, (0, 0). Raises DataError for an empty file or one that cannot be read.
    """
    size = _size(path)
    if path.suffix == ".gz":
        return [(0, 0)]
    cuts = [0]
    with _naming(path), path.open("rb") as file:
        for target in range(part_bytes, size, part_bytes):
            file.seek(max(target, cuts[-1]))
            file.readline(BLOCK_BYTES)
            if cuts[-1] < file.tell() < size:
                cuts.append(file.tell())
    return list(pairwise([*cuts, size]))


def read_part(path: Path, start: int, stop: int, rejects: Rejects) -> Iterator[Rows]:
    """Yields the rows of one of ``parts``, some thousands at a time.

    Lines may end in CRLF. A last line without a line break that stops short of its 40 columns goes
    to ``rejects.cut``, what else is malformed to ``rejects.malformed``, with file, line and column.
    """
    place = _Place(path, start)
    line = 0
    rest = b""
    for text in _blocks(path, start, stop):
        cut = text.rfind(b"\n") + 1
        if not cut:
            rest += text
            if len(rest) > BLOCK_BYTES:
                raise DataError(
                    f"{place(line)}: no line break in {len(rest)} bytes; "
                    f"expected lines of {_LAYOUT}."
                )
            continue
        block = rest + text[:cut]
        yield from _rows(block, line, place, rejects)
        line += block.count(b"\n")
        rest = text[cut:]
    if rest and not _left_out(rest, line, place, rejects):
        yield from _rows(rest + b"\n", line, place, rejects)


def count_rows(path: Path, rejects: Rejects) -> int:
    """Rows of a file whose every row is well formed, by its line breaks alone."""
    count = 0
    rest = b""
    for text in _blocks(path, 0, _size(path)):
        count += text.count(b"\n")
        cut = text.rfind(b"\n") + 1
        rest = text[cut:] if cut else rest + text
        if len(rest) > BLOCK_BYTES:
            raise DataError(f"{path}: no line break in {len(rest)} bytes; expected {_LAYOUT}.")
    return count + (bool(rest) and not _left_out(rest, count, _Place(path, 0), rejects))


def no_rows(path: Path) -> DataError:
    return DataError(f"{path} holds no complete row; expected lines of {_LAYOUT}.")


class _Place:
    """Names a line of a part by its number in the file; what lies before is counted only then."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.start = path, start

    @functools.cached_property
    def lines_before(self) -> int:
        return sum(text.count(b"\n") for text in _blocks(self.path, 0, self.start))

    def __call__(self, line: int) -> str:
        before = self.lines_before if self.start else 0
        return f"{self.path}, line {before + line + 1}"


def _rows(text: bytes, line: int, place: _Place, rejects: Rejects) -> Iterator[Rows]:
    """The good rows of a block that ends in a line break; the block's first line is ``line``."""
    try:
        rows = _parse(text)
    except _BadLineError as bad:
        middle = text.find(b"\n", len(text) // 2) + 1
        if middle == len(text):
            middle = text.rfind(b"\n", 0, -1) + 1
        if rejects.skip and middle:
            yield from _rows(text[:middle], line, place, rejects)
            line += text[:middle].count(b"\n")
            yield from _rows(text[middle:], line, place, rejects)
        else:
            rejects.malformed(f"{place(line + bad.line)}{bad.says}")
    else:
        yield rows


def _size(path: Path) -> int:
    with _naming(path):
        size = path.stat().st_size
    if not size:
        raise no_rows(path)
    return size


def _blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """The bytes from ``start`` to ``stop``; all of a ``.gz``."""
    if path.suffix == ".gz":
        with _naming(path), gzip.open(path, "rb") as packed:
            while text := packed.read(BLOCK_BYTES):
                yield text
        return
    with _naming(path), path.open("rb") as file:
        file.seek(start)
        while text := file.read(min(BLOCK_BYTES, stop - file.tell())):
            yield text


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """What the system says about the file, as a DataError that names it."""
    try:
        yield
    except FileNotFoundError:
        raise DataError(f"no file '{path}'; give the path of a Criteo file.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole gzip file ({error}); fetch it again, or drop the .gz suffix."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _left_out(text: bytes, line: int, place: _Place, rejects: Rejects) -> bool:
    """Whether a last line that no line break ends stops short; ``rejects.cut`` says so.

    It is whole with 40 columns, the last of which is empty or, as in every Criteo file, 8 digits.
    """
    fields = text.rstrip(b"\r").split(b"\t")
    if len(fields) > COLUMNS or (len(fields) == COLUMNS and len(fields[-1]) in (0, 8)):
        return False
    if len(fields) < COLUMNS:
        short = f"stops after {len(fields)} of {COLUMNS} columns"
    else:
        short = f"stops after {len(fields[-1])} of 8 digits in its last column"
    rejects.cut.append(
        f"{place(line)}: the last line {short}; it was left out. Expected {_LAYOUT}."
    )
    return True


# --- one block -----------------------------------------------------------------------------------


def _parse(text: bytes) -> Rows:
    """The rows of a block that ends in a line break. Raises _BadLineError."""
    # Sixteen bytes in front, so that the words that end at the first field are inside the array.
    padded = numpy.frombuffer(b"\n" * 16 + text, dtype=numpy.uint8)
    classes = _CLASS[padded]
    separators = numpy.flatnonzero(classes[16:] >= _TAB) + 16
    if len(separators) % COLUMNS or not _forty_columns(classes, separators):
        _refuse_columns(classes, separators)
    ends = separators.reshape(-1, COLUMNS)
    starts = numpy.empty_like(ends)
    starts.reshape(-1)[0] = 16
    starts.reshape(-1)[1:] = separators[:-1] + 1
    ends[:, -1] -= padded[ends[:, -1] - 1] == ord("\r")
    block = _Block(padded, classes)
    return Rows(
        labels=block.labels(starts[:, 0], ends[:, 0]),
        counts=block.counts(starts[:, 1 : 1 + DENSE_COLUMNS], ends[:, 1 : 1 + DENSE_COLUMNS]),
        ids=block.ids(starts[:, 1 + DENSE_COLUMNS :], ends[:, 1 + DENSE_COLUMNS :]),
    )


def _forty_columns(classes: Bytes, separators: Places) -> bool:
    kinds = classes[separators].reshape(-1, COLUMNS)
    return bool((kinds[:, -1] == _BREAK).all()) and int((kinds == _BREAK).sum()) == len(kinds)


def _refuse_columns(classes: Bytes, separators: Places) -> None:
    breaks = numpy.flatnonzero(classes[separators] == _BREAK)
    columns = numpy.diff(breaks, prepend=-1)
    bad = int(numpy.flatnonzero(columns != COLUMNS)[0])
    found = int(columns[bad])
    if found == 1:
        raise _BadLineError(bad, f": no tab in the line; expected {_LAYOUT}.")
    says = f", column {min(found, COLUMNS + 1)}: {found} columns; expected {_LAYOUT}."
    raise _BadLineError(bad, says)


class _Block:
    """The bytes of one block, and the three kinds of field in them."""

    def __init__(self, padded: Bytes, classes: Bytes) -> None:
        self.padded = padded
        # Eight bytes from any offset as one big-endian word: unaligned, overlapping, no copy.
        self.words = numpy.ndarray((len(classes) - 7,), dtype=">u8", buffer=classes, strides=(1,))

    def labels(self, starts: Places, ends: Places) -> numpy.typing.NDArray[numpy.uint8]:
        first = self.padded[starts]
        bad = (ends - starts != 1) | ((first != ord("0")) & (first != ord("1")))
        self._refuse_any(bad, starts, ends, 0, "0 or 1")
        return first - numpy.uint8(ord("0"))

    def counts(self, starts: Places, ends: Places) -> numpy.typing.NDArray[numpy.int64]:
        missing = ends == starts
        negative = (self.padded[starts] == ord("-")) & ~missing
        digits = ends - starts - negative
        words = self._last_digits(ends, digits)
        # A byte above 9 carries into its high half when 6 is added.
        bad = _any_high(words + numpy.uint64(0x0606060606060606)) | _any_high(words)
        bad |= (digits == 0) & ~missing
        values = _decimal(words)
        long = digits > 8
        if long.any():
            upper = self._last_digits(ends[long] - 8, digits[long] - 8)
            bad[long] |= _any_high(upper + numpy.uint64(0x0606060606060606)) | _any_high(upper)
            bad[long] |= digits[long] > _LONGEST_COUNT
            values[long] += _decimal(upper) * 100_000_000
        expected = f"an integer of at most {_LONGEST_COUNT} digits, or nothing"
        self._refuse_any(bad, starts, ends, 1, expected)
        numpy.negative(values, out=values, where=negative)
        values[missing] = MISSING_COUNT
        return values

    def ids(self, starts: Places, ends: Places) -> numpy.typing.NDArray[numpy.int64]:
        digits = ends - starts
        words = self._last_digits(ends, digits)
        bad = _any_high(words) | (digits > 8)
        expected = "a hexadecimal id of at most 8 digits, or nothing"
        self._refuse_any(bad, starts, ends, 1 + DENSE_COLUMNS, expected)
        values = _hexadecimal(words)
        values[digits == 0] = MISSING_ID
        return values

    def _last_digits(self, ends: Places, digits: Places) -> Words:
        """The field's last eight digits, one per byte, the last in the lowest; zeros in front."""
        words = self.words[ends - 8].astype(numpy.uint64)
        words &= _LAST_BYTES[numpy.clip(digits, 0, 8)]
        return words

    def _refuse_any(
        self,
        bad: numpy.typing.NDArray[numpy.bool_],
        starts: Places,
        ends: Places,
        first_column: int,
        expected: str,
    ) -> None:
        if not bad.any():
            return
        row, column = (int(index[0]) for index in numpy.nonzero(bad.reshape(len(bad), -1)))
        start, end = (places.reshape(len(bad), -1)[row, column] for places in (starts, ends))
        field = self.padded[start:end].tobytes().decode("utf-8", "backslashreplace")
        shown = repr(field if len(field) <= 32 else field[:32] + "...")
        column += first_column
        says = f"({column_name(column)}): found {shown}; expected {expected}."
        raise _BadLineError(row, f", column {column + 1} {says}")


# --- eight digits in one word --------------------------------------------------------------------


def _any_high(words: Words) -> numpy.typing.NDArray[numpy.bool_]:
    """Whether any byte is 16 or more: no hex digit."""
    return (words & numpy.uint64(0xF0F0F0F0F0F0F0F0)) != 0


def _hexadecimal(words: Words) -> numpy.typing.NDArray[numpy.int64]:
    """One digit per byte to a number: pairs, then fours, then all eight."""
    words = (words | (words >> numpy.uint64(4))) & numpy.uint64(0x00FF00FF00FF00FF)
    words = (words | (words >> numpy.uint64(8))) & numpy.uint64(0x0000FFFF0000FFFF)
    words = (words | (words >> numpy.uint64(16))) & numpy.uint64(0x00000000FFFFFFFF)
    return words.astype(numpy.int64)


def _decimal(words: Words) -> numpy.typing.NDArray[numpy.int64]:
    """The same with tens: each step is ``upper * 10^k + lower`` in every lane at once."""
    for lane, mask, ten in (
        (8, 0x00FF00FF00FF00FF, 10),
        (16, 0x0000FFFF0000FFFF, 100),
        (32, 0x00000000FFFFFFFF, 10_000),
    ):
        upper = (words >> numpy.uint64(lane)) & numpy.uint64(mask)
        words = upper * numpy.uint64(ten) + (words & numpy.uint64(mask))
    return words.astype(numpy.int64)
