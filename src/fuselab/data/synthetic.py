"""Synthetic Criteo: the same layout, Zipf-distributed ids, and a click model that can be learned.

Rates and shapes (missing fields, share of the most frequent id, level and spread of every count)
follow statistics of 1,999 public rows; cardinalities are those of the whole Kaggle set. The click
model is fixed: a seed changes which rows are drawn, never the model, so rows of one seed train a
model that rows of another seed validate. Rows come in chunks that are drawn independently, so a
longer file begins with the shorter one's rows.
"""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

import numpy
import numpy.typing

from fuselab.data.layout import (
    DENSE_COLUMNS,
    KAGGLE_CARDINALITIES,
    MISSING_COUNT,
    MISSING_ID,
    SPARSE_COLUMNS,
    Rows,
)
from fuselab.data.rejects import Rejects
from fuselab.data.source import regrouped
from fuselab.errors import ArgumentError
from fuselab.report.progress import Progress

CHUNK_ROWS = 16_384
PART_ROWS = 16 * CHUNK_ROWS  # rows of a parquet row group, and of a shard of prepared rows

Floats = numpy.typing.NDArray[numpy.float64]
Integers = numpy.typing.NDArray[numpy.int64]

# --- what the columns look like ------------------------------------------------------------------

# Columns that are missing together, with the share of rows: dense I1 to I13 and sparse C1 to C26.
_MISSING_DENSE = (
    (0.445, (1, 10)), (0.225, (3,)), (0.21, (4, 13)), (0.047, (5, 7, 9, 11)), (0.247, (6,)),
    (0.001, (8,)), (0.777, (12,)),
)  # fmt: skip
_MISSING_SPARSE = (
    (0.033, (3, 4, 12, 16, 21, 24)), (0.126, (6,)), (0.483, (19, 20, 25, 26)), (0.816, (22,)),
)  # fmt: skip

# Mean and standard deviation of log(count + 1), I1 to I13.
_COUNT_LEVEL = (0.8, 2.2, 2.2, 1.7, 7.2, 3.6, 1.5, 2.1, 3.6, 0.35, 0.85, 0.3, 1.9)
_COUNT_SPREAD = (0.9, 1.9, 1.2, 0.9, 2.2, 1.6, 1.2, 1.1, 1.4, 0.4, 0.6, 0.6, 1.1)
_NEGATIVE_COLUMN, _MINUS_ONE, _MINUS_TWO = 1, 0.107, 0.002  # only I2 has negative counts

# Share of the most frequent id, C1 to C26; with the cardinality it determines the Zipf exponent.
_TOP_SHARE = (
    0.51, 0.11, 0.06, 0.09, 0.68, 0.46, 0.012, 0.59, 0.90, 0.27, 0.024, 0.06, 0.025,
    0.35, 0.021, 0.06, 0.42, 0.055, 0.56, 0.34, 0.06, 0.52, 0.46, 0.09, 0.35, 0.087,
)  # fmt: skip

# --- the click model -----------------------------------------------------------------------------

_BIAS = -0.35  # gives 25.6 % positives, the rate of the Kaggle set
_DENSE_WEIGHTS = (0.35, 0.0, 0.2, 0.0, -0.35, -0.3, 0.4, 0.0, 0.0, 0.2, 0.5, 0.0, -0.2)
# Standard deviation of an id's effect on the logit, for columns C1 to C26.
_ID_EFFECT = (
    0.3, 0.5, 0.2, 0.2, 0.2, 0.5, 0.3, 0.2, 0.0, 0.2, 0.3, 0.2, 0.0,
    0.5, 0.0, 0.2, 0.6, 0.4, 0.0, 0.3, 0.0, 0.3, 0.4, 0.2, 0.2, 0.0,
)  # fmt: skip
# Columns whose ids interact: the product of one hidden factor each, times the weight.
_PAIRS = ((5, 16, 0.6), (13, 22, 0.5))


def synthesize(
    path: str | Path, rows: int, seed: int = 0, progress: Progress | None = None
) -> None:
    """Write ``rows`` synthetic rows to ``path``.

    The file is parquet if the path ends in ``.parquet`` or ``.pq``, otherwise Criteo TSV, gzipped
    if it ends in ``.gz``. Memory stays at one row group. The same rows and seed give the same bytes
    (with the same numpy). Raises ArgumentError for a bad count or seed and for ``.npz``,
    MissingDependencyError for parquet without pyarrow, OSError if the file cannot be written.
    """
    _check(rows, seed)
    path = Path(path)
    if path.suffix == ".npz":
        raise ArgumentError("synthetic rows become text or parquet; give another name than .npz.")
    if path.suffix in (".parquet", ".pq"):
        from fuselab.data import parquet  # needs pyarrow

        parquet.write(path, regrouped(_shown(rows, seed, progress), PART_ROWS))
        return
    with contextlib.ExitStack() as closing:
        file: IO[bytes] = closing.enter_context(open(path, "wb"))
        if path.suffix == ".gz":
            # The header gets no name and no time, so that equal rows give equal bytes.
            file = cast(IO[bytes], gzip.GzipFile("", "wb", 1, file, mtime=0))
            closing.callback(file.close)
        for piece in _shown(rows, seed, progress):
            file.write(to_text(piece))


def _shown(rows: int, seed: int, progress: Progress | None) -> Iterator[Rows]:
    """Yield ``pieces``, showing the progress of their consumer."""
    if progress is not None:
        progress.begin("draw:", -(-rows // CHUNK_ROWS))
    for piece in pieces(rows, seed):
        yield piece
        if progress is not None:
            progress.update(len(piece))


def pieces(rows: int, seed: int = 0) -> Iterator[Rows]:
    """Yield the same rows in memory, at most CHUNK_ROWS at a time."""
    _check(rows, seed)
    for number, start in enumerate(range(0, rows, CHUNK_ROWS)):
        yield chunk(seed, number)[: min(CHUNK_ROWS, rows - start)]


@dataclass(frozen=True)
class Synthetic:
    """The same rows as a source that ``prepare`` takes."""

    rows: int
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.rows, self.seed)

    @property
    def path(self) -> str:
        return f"synthetic rows of seed {self.seed}"

    @property
    def files(self) -> tuple[Path, ...]:
        return (Path(self.path),)

    def identity(self) -> list[dict[str, Any]]:
        return [{"name": self.path, "bytes": 0, "rows": self.rows}]

    def parts(self, part_bytes: int) -> list[SyntheticPart]:
        return [
            SyntheticPart(self.files[0], self.seed, start, min(start + PART_ROWS, self.rows))
            for start in range(0, self.rows, PART_ROWS)
        ]


@dataclass(frozen=True)
class SyntheticPart:
    """Rows ``start`` to ``stop``; ``start`` is a multiple of CHUNK_ROWS."""

    file: Path
    seed: int
    start: int
    stop: int

    def read(self, rejects: Rejects) -> Iterator[Rows]:
        for first in range(self.start, self.stop, CHUNK_ROWS):
            yield chunk(self.seed, first // CHUNK_ROWS)[: self.stop - first]


def _check(rows: int, seed: int) -> None:
    if rows < 1:
        raise ArgumentError(f"{rows} rows were asked for; ask for at least 1.")
    if seed < 0:
        raise ArgumentError(f"the seed is {seed}; it must be 0 or more.")


# --- drawing -------------------------------------------------------------------------------------


def chunk(seed: int, number: int) -> Rows:
    """Draw the CHUNK_ROWS rows of one chunk, independently of other chunks."""
    draw = numpy.random.Generator(numpy.random.Philox(numpy.random.SeedSequence([seed, number])))
    counts = _draw_counts(draw)
    ids = _draw_ids(draw)
    chance = 1.0 / (1.0 + numpy.exp(-_logit(counts, ids)))
    labels = (draw.random(CHUNK_ROWS) < chance).astype(numpy.uint8)
    return Rows(labels, counts, ids)


def _draw_counts(draw: numpy.random.Generator) -> Integers:
    normal = draw.standard_normal((DENSE_COLUMNS, CHUNK_ROWS))
    levels = numpy.array(_COUNT_LEVEL)[:, None] + numpy.array(_COUNT_SPREAD)[:, None] * normal
    counts = numpy.expm1(numpy.clip(levels, 0.0, 16.0)).astype(numpy.int64)
    low = draw.random(CHUNK_ROWS)
    counts[_NEGATIVE_COLUMN][low < _MINUS_ONE] = -1
    counts[_NEGATIVE_COLUMN][low < _MINUS_TWO] = -2
    for share, columns in _MISSING_DENSE:
        missing = draw.random(CHUNK_ROWS) < share
        for column in columns:
            counts[column - 1][missing] = MISSING_COUNT
    return numpy.ascontiguousarray(counts.T)


def _draw_ids(draw: numpy.random.Generator) -> Integers:
    ids = numpy.empty((SPARSE_COLUMNS, CHUNK_ROWS), dtype=numpy.int64)
    for column, (cardinality, exponent) in enumerate(
        zip(KAGGLE_CARDINALITIES, _EXPONENTS, strict=True)
    ):
        ranks = _zipf_ranks(draw.random(CHUNK_ROWS), cardinality, exponent)
        # Distinct ranks of a column give distinct ids, because every step of the mix can be undone.
        ids[column] = _mix(ranks.astype(numpy.uint32) ^ _COLUMN_KEYS[column]).astype(numpy.int64)
    for share, columns in _MISSING_SPARSE:
        missing = draw.random(CHUNK_ROWS) < share
        for column in columns:
            ids[column - 1][missing] = MISSING_ID
    return numpy.ascontiguousarray(ids.T)


def _zipf_ranks(uniform: Floats, cardinality: int, exponent: float) -> Integers:
    """Return ranks 0 to cardinality - 1 with density proportional to (rank + 1)^-exponent.

    They are the inverse of the continuous distribution function on [1, cardinality + 1), rounded
    down.
    """
    power = 1.0 - exponent
    top = (cardinality + 1.0) ** power
    ranks = (1.0 + uniform * (top - 1.0)) ** (1.0 / power) - 1.0
    return numpy.asarray(numpy.minimum(ranks.astype(numpy.int64), cardinality - 1))


def _zipf_exponent(cardinality: int, top_share: float) -> float:
    """Return the exponent with which rank 0 gets ``top_share``, by bisection."""
    low, high = 0.0, 8.0
    for _ in range(60):
        power = 1.0 - (low + high) / 2 + 1e-9  # never exactly 0
        share = (2.0**power - 1.0) / ((cardinality + 1.0) ** power - 1.0)
        low, high = ((low + high) / 2, high) if share < top_share else (low, (low + high) / 2)
    return (low + high) / 2 - 1e-9


def _mix(words: numpy.typing.NDArray[numpy.uint32]) -> numpy.typing.NDArray[numpy.uint32]:
    """Return a one-to-one scramble of 32-bit words (xor-shifts and odd factors)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ (words >> numpy.uint32(shift))) * numpy.uint32(factor)
    return words ^ (words >> numpy.uint32(16))


_EXPONENTS = tuple(map(_zipf_exponent, KAGGLE_CARDINALITIES, _TOP_SHARE))
_COLUMN_KEYS = _mix(numpy.arange(1, SPARSE_COLUMNS + 1, dtype=numpy.uint32))


# --- what is true of a row -----------------------------------------------------------------------


def _logit(counts: Integers, ids: Integers) -> Floats:
    """Return the logit of a click, float64 [n]: linear in the log counts, plus an effect per id and
    two pairs."""
    logit = numpy.full(len(counts), _BIAS)
    for column, weight in enumerate(_DENSE_WEIGHTS):
        if weight:
            logs = numpy.log1p(numpy.maximum(counts[:, column], 0))
            logit += weight * (logs - _COUNT_LEVEL[column]) / _COUNT_SPREAD[column]
    for column, size in enumerate(_ID_EFFECT):
        if size:
            logit += size * _hidden(ids[:, column], column)
    for left, right, weight in _PAIRS:
        logit += weight * _hidden(ids[:, left], left + 100) * _hidden(ids[:, right], right + 100)
    return logit


def _hidden(ids: Integers, salt: int) -> Floats:
    """Return a fixed number per id, uniform with mean 0 and standard deviation 1."""
    key = numpy.uint32((salt * 0x9E3779B1) & 0xFFFFFFFF)
    words = _mix(ids.astype(numpy.uint32) ^ key)
    effects: Floats = (words / 2.0**32 - 0.5) * 12.0**0.5
    return effects


# --- text ----------------------------------------------------------------------------------------

_HEX_PAIRS = numpy.frombuffer(
    "".join(f"{value:02x}" for value in range(256)).encode(), dtype=numpy.uint16
)
_COUNT_DIGITS = 8  # drawn counts stay below exp(16)


def to_text(rows: Rows) -> bytes:
    """Return the rows as Criteo TSV.

    Every field goes into a slot of fixed width in a byte matrix, padded with zero bytes; dropping
    the zero bytes leaves the text.
    """
    label = numpy.empty((len(rows), 2), dtype=numpy.uint8)
    label[:, 0] = rows.labels + ord("0")
    label[:, 1] = ord("\t")
    counts, ids = _count_slots(rows.counts), _id_slots(rows.ids)
    ids[:, -1, -1] = ord("\n")
    lines = [label, counts.reshape(len(rows), -1), ids.reshape(len(rows), -1)]
    text = numpy.concatenate(lines, axis=1)
    return bytes(text[text != 0].tobytes())


def _count_slots(counts: Integers) -> numpy.typing.NDArray[numpy.uint8]:
    """Return uint8 [n, 13, 10]: a minus, up to eight digits and a tab; only the tab where
    missing."""
    slots = numpy.zeros((*counts.shape, _COUNT_DIGITS + 2), dtype=numpy.uint8)
    slots[..., -1] = ord("\t")
    missing = counts == MISSING_COUNT
    slots[..., 0][(counts < 0) & ~missing] = ord("-")
    rest = numpy.abs(numpy.where(missing, 0, counts)).astype(numpy.uint32)
    for place in range(_COUNT_DIGITS, 0, -1):
        shown = ~missing if place == _COUNT_DIGITS else rest != 0
        if not shown.any():
            break
        shorter = rest // numpy.uint32(10)
        digit = (rest - shorter * numpy.uint32(10)).astype(numpy.uint8) + numpy.uint8(ord("0"))
        slots[..., place] = digit * shown
        rest = shorter
    return slots


def _id_slots(ids: Integers) -> numpy.typing.NDArray[numpy.uint8]:
    """Return uint8 [n, 26, 9]: eight hex digits and a tab; only the tab where missing."""
    slots = numpy.empty((*ids.shape, 9), dtype=numpy.uint8)
    slots[..., 8] = ord("\t")
    big_endian = ids.astype(">u4").view(numpy.uint8)  # [n, 26 * 4]
    slots[..., :8] = _HEX_PAIRS[big_endian].view(numpy.uint8).reshape(*ids.shape, 8)
    slots[..., :8][ids == MISSING_ID] = 0
    return slots
