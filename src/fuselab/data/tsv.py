"""Read Criteo's tab-separated files in whole blocks, with the exact place of every error.

A block is some megabytes of text that end at a line break. Every step below works on the whole
block in numpy: find the separators, load the eight bytes that end at each field into one 64-bit
word, and turn digits into numbers by three shift-and-mask steps in that word. Lines with a wrong
number of columns are left out before these steps, lines with a malformed field after them.
"""

from __future__ import annotations

import codecs
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
    FOR_PREDICT,
    MISSING_COUNT,
    MISSING_ID,
    MISSING_LABEL,
    Rows,
    column_name,
)
from fuselab.data.rejects import Rejects
from fuselab.errors import DataError, MissingDataError

# about 8,700 rows; the fastest of 1 to 16 MiB, since it stays in a 2-core L2/L3
BLOCK_BYTES = 2 << 20

_LONGEST_COUNT = 16  # digits; a count is parsed as two words of eight

# The class of every byte: the value of a hex digit, or one of these.
_BREAK, _TAB, _OTHER = 0xFF, 0xFE, 0xF0
_CLASS = numpy.full(256, _OTHER, dtype=numpy.uint8)
_CLASS[ord("\t")], _CLASS[ord("\n")] = _TAB, _BREAK
for _value, _digit in enumerate("0123456789abcdef"):
    _CLASS[ord(_digit)] = _CLASS[ord(_digit.upper())] = _value

# Masks that keep the last n bytes of a big-endian word, for n = 0..8.
_LAST_BYTES = numpy.array([(1 << (8 * n)) - 1 for n in range(9)], dtype=numpy.uint64)

Words = numpy.typing.NDArray[numpy.uint64]
Places = numpy.typing.NDArray[numpy.int64]
Bytes = numpy.typing.NDArray[numpy.uint8]


def _columns(labelled: bool) -> int:
    return COLUMNS if labelled else COLUMNS - 1


def _layout(labelled: bool) -> str:
    label = "label, " if labelled else ""
    return f"{_columns(labelled)} tab-separated columns ({label}13 integers, 26 hex ids)"


def has_labels(path: Path) -> bool:
    """Return False if the first line has the 39 columns of Kaggle's ``test.txt``."""
    text = next(_blocks(path, 0, _size(path)), b"")
    return text.partition(b"\n")[0].count(b"\t") + 1 != _columns(labelled=False)


def parts(path: Path, part_bytes: int, labelled: bool) -> list[tuple[int, int]]:
    """Return byte ranges of whole lines, each of about ``part_bytes``, where the file can be cut.

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


def read_part(
    path: Path, start: int, stop: int, rejects: Rejects, labelled: bool
) -> Iterator[Rows]:
    """Yield the rows of one of ``parts``, some thousands at a time.

    If ``labelled`` is false, the lines have no first column. Lines may end in CRLF. A last line
    without a line break that stops short of its columns goes to ``rejects.cut``, anything else
    malformed to ``rejects.malformed``, with file, line and column.
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
                    f"expected lines of {_layout(labelled)}."
                )
            continue
        block = rest + text[:cut]
        yield _rows(block, line, place, rejects, labelled)
        line += block.count(b"\n")
        rest = text[cut:]
    if rest and not _left_out(rest, line, place, rejects, labelled):
        yield _rows(rest + b"\n", line, place, rejects, labelled)


def count_rows(path: Path, rejects: Rejects, labelled: bool) -> int:
    """Return the number of rows of a file whose every row is well formed, by its line breaks.

    Raises DataError if the first line has another number of columns, since every other line of a
    file in another format, or without labels, will have it too.
    """
    first, line_break, _ = next(_blocks(path, 0, _size(path)), b"").partition(b"\n")
    found = first.count(b"\t") + 1
    if line_break and found != _columns(labelled):
        raise DataError(f"{path}, line 1{_wrong_columns(found, labelled)}")
    count = 0
    rest = b""
    for text in _blocks(path, 0, _size(path)):
        count += text.count(b"\n")
        cut = text.rfind(b"\n") + 1
        rest = text[cut:] if cut else rest + text
        if len(rest) > BLOCK_BYTES:
            raise DataError(
                f"{path}: no line break in {len(rest)} bytes; expected {_layout(labelled)}."
            )
    return count + (bool(rest) and not _left_out(rest, count, _Place(path, 0), rejects, labelled))


def no_rows(path: Path) -> DataError:
    return DataError(f"{path} holds no complete row; expected lines of {_layout(labelled=True)}.")


class _Place:
    """Names a line of a part by its number in the file, counting the lines before only when
    asked."""

    def __init__(self, path: Path, start: int) -> None:
        self.path, self.start = path, start

    @functools.cached_property
    def lines_before(self) -> int:
        return sum(text.count(b"\n") for text in _blocks(self.path, 0, self.start))

    def __call__(self, line: int) -> str:
        before = self.lines_before if self.start else 0
        return f"{self.path}, line {before + line + 1}"


def _rows(text: bytes, line: int, place: _Place, rejects: Rejects, labelled: bool) -> Rows:
    """Return the good rows of a block that ends in a line break and begins at line ``line``."""
    block = _Block(text, labelled)
    rows = block.rows()
    for number, says in block.faults():
        rejects.malformed(f"{place(line + number)}{says}")
    return rows


def _size(path: Path) -> int:
    with _naming(path):
        size = path.stat().st_size
    if not size:
        raise no_rows(path)
    return size


def _blocks(path: Path, start: int, stop: int) -> Iterator[bytes]:
    """Yield the bytes from ``start`` to ``stop``; all of a ``.gz``.

    A byte order mark at the beginning of the file, as Windows editors write it, is left out.
    """
    packed = path.suffix == ".gz"
    with _naming(path), gzip.open(path) if packed else path.open("rb") as file:
        if start or file.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
            file.seek(start)
        while text := file.read(BLOCK_BYTES if packed else min(BLOCK_BYTES, stop - file.tell())):
            yield text


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn the system's errors about the file into DataErrors that name it."""
    try:
        yield
    except FileNotFoundError:
        raise MissingDataError(f"no file '{path}'; give the path of a Criteo file.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(
            f"{path} is not a whole gzip file ({error}); fetch it again, or drop the .gz suffix."
        ) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from error


def _left_out(text: bytes, line: int, place: _Place, rejects: Rejects, labelled: bool) -> bool:
    """Return whether a last line without a line break stops short; ``rejects.cut`` then says so.

    It is whole if it has all columns and the last is empty or, as in every Criteo file, has 8
    digits.
    """
    fields = text.rstrip(b"\r").split(b"\t")
    columns = _columns(labelled)
    if len(fields) > columns or (len(fields) == columns and len(fields[-1]) in (0, 8)):
        return False
    if len(fields) < columns:
        short = f"stops after {len(fields)} of {columns} columns"
    else:
        short = f"stops after {len(fields[-1])} of 8 digits in its last column"
    rejects.cut.append(
        f"{place(line)}: the last line {short}; it was left out. Expected {_layout(labelled)}."
    )
    return True


# --- one block -----------------------------------------------------------------------------------


class _Block:
    """A block that ends in a line break: its good rows, and what is wrong with its other lines."""

    def __init__(self, text: bytes, labelled: bool) -> None:
        self.labelled = labelled
        # Sixteen bytes in front, so that the words that end at the first field are inside the
        # array.
        self.padded = numpy.frombuffer(b"\n" * 16 + text, dtype=numpy.uint8)
        classes = _CLASS[self.padded]
        # Eight bytes from any offset as one big-endian word: unaligned, overlapping, no copy.
        self.words = numpy.ndarray((len(classes) - 7,), dtype=">u8", buffer=classes, strides=(1,))
        ends = numpy.flatnonzero(classes[16:] >= _TAB) + 16
        starts = numpy.empty_like(ends)
        starts[0] = 16
        starts[1:] = ends[:-1] + 1
        # columns per line
        self.columns = numpy.diff(numpy.flatnonzero(classes[ends] == _BREAK), prepend=-1)
        self.whole = self.columns == _columns(labelled)
        if not self.whole.all():
            kept = numpy.repeat(self.whole, self.columns)
            starts, ends = starts[kept], ends[kept]
        self.starts, self.ends = (each.reshape(-1, _columns(labelled)) for each in (starts, ends))
        self.ends[:, -1] -= self.padded[self.ends[:, -1] - 1] == ord("\r")
        # malformed fields, of the lines with all columns
        self.bad = numpy.zeros(self.ends.shape, dtype=numpy.bool_)

    def rows(self) -> Rows:
        """Return the rows of the lines without a fault."""
        first = int(self.labelled)
        counts, ids = slice(first, first + DENSE_COLUMNS), slice(first + DENSE_COLUMNS, None)
        rows = Rows(self._labels(), self._counts(counts), self._ids(ids))
        if not self.bad.any():
            return rows
        good = ~self.bad.any(axis=1)
        return Rows(rows.labels[good], rows.counts[good], rows.ids[good])

    def faults(self) -> Iterator[tuple[int, str]]:
        """Yield every line that ``rows``, called before, left out: its 0-based number and its
        fault.

        The fault continues a sentence, for example ", column 3 (I2): found ...".
        """
        lines = numpy.flatnonzero(self.whole)
        faulty = ~self.whole
        faulty[lines] = self.bad.any(axis=1)
        for line in numpy.flatnonzero(faulty).tolist():
            if self.whole[line]:
                yield line, self._wrong_field(int(numpy.searchsorted(lines, line)))
            else:
                yield line, _wrong_columns(int(self.columns[line]), self.labelled)

    def _labels(self) -> numpy.typing.NDArray[numpy.uint8]:
        if not self.labelled:
            return numpy.full(len(self.ends), MISSING_LABEL, dtype=numpy.uint8)
        starts, ends = self.starts[:, 0], self.ends[:, 0]
        first = self.padded[starts]
        self.bad[:, 0] = (ends - starts != 1) | ((first != ord("0")) & (first != ord("1")))
        return first - numpy.uint8(ord("0"))

    def _counts(self, columns: slice) -> numpy.typing.NDArray[numpy.int64]:
        starts, ends = self.starts[:, columns], self.ends[:, columns]
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
        self.bad[:, columns] = bad
        numpy.negative(values, out=values, where=negative)
        values[missing] = MISSING_COUNT
        return values

    def _ids(self, columns: slice) -> numpy.typing.NDArray[numpy.int64]:
        starts, ends = self.starts[:, columns], self.ends[:, columns]
        digits = ends - starts
        words = self._last_digits(ends, digits)
        self.bad[:, columns] = _any_high(words) | (digits > 8)
        values = _hexadecimal(words)
        values[digits == 0] = MISSING_ID
        return values

    def _last_digits(self, ends: Places, digits: Places) -> Words:
        """Return the field's last eight digits, one per byte, the last in the lowest; zeros in
        front."""
        words = self.words[ends - 8].astype(numpy.uint64)
        words &= _LAST_BYTES[numpy.clip(digits, 0, 8)]
        return words

    def _wrong_field(self, row: int) -> str:
        place = int(self.bad[row].argmax())
        field = self.padded[self.starts[row, place] : self.ends[row, place]].tobytes()
        text = field.decode("utf-8", "backslashreplace")
        shown = repr(text if len(text) <= 32 else text[:32] + "...")
        column = place + (not self.labelled)
        if column == 0:
            expected = "0 or 1"
        elif column <= DENSE_COLUMNS:
            expected = f"an integer of at most {_LONGEST_COUNT} digits, or nothing"
        else:
            expected = "a hexadecimal id of at most 8 digits, or nothing"
        name = column_name(column)
        return f", column {place + 1} ({name}): found {shown}; expected {expected}."


def _wrong_columns(found: int, labelled: bool) -> str:
    expected = f"expected {_layout(labelled)}."
    if found == 1:
        return f": no tab in the line; {expected}"
    if labelled and found == _columns(labelled=False):
        expected += f" {FOR_PREDICT}"
    return f", column {min(found, _columns(labelled) + 1)}: {found} columns; {expected}"


# --- eight digits in one word --------------------------------------------------------------------


def _any_high(words: Words) -> numpy.typing.NDArray[numpy.bool_]:
    """Return whether any byte is 16 or more, so no hex digit."""
    marked: numpy.typing.NDArray[numpy.bool] = (words & numpy.uint64(0xF0F0F0F0F0F0F0F0)) != 0
    return marked


def _hexadecimal(words: Words) -> numpy.typing.NDArray[numpy.int64]:
    """Turn one hex digit per byte into a number: pairs, then fours, then all eight."""
    words = (words | (words >> numpy.uint64(4))) & numpy.uint64(0x00FF00FF00FF00FF)
    words = (words | (words >> numpy.uint64(8))) & numpy.uint64(0x0000FFFF0000FFFF)
    words = (words | (words >> numpy.uint64(16))) & numpy.uint64(0x00000000FFFFFFFF)
    return words.astype(numpy.int64)


def _decimal(words: Words) -> numpy.typing.NDArray[numpy.int64]:
    """Turn one decimal digit per byte into a number.

    Each step is ``upper * 10^k + lower`` in every lane at once.
    """
    for lane, mask, ten in (
        (8, 0x00FF00FF00FF00FF, 10),
        (16, 0x0000FFFF0000FFFF, 100),
        (32, 0x00000000FFFFFFFF, 10_000),
    ):
        upper = (words >> numpy.uint64(lane)) & numpy.uint64(mask)
        words = upper * numpy.uint64(ten) + (words & numpy.uint64(mask))
    return words.astype(numpy.int64)
