"""Statistics of rows that can be added up: of parts, in processes, in any order."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import numpy.typing

from fuselab.data.layout import DENSE_COLUMNS, SPARSE_COLUMNS, Counts, Rows, is_missing
from fuselab.data.rejects import Rejects
from fuselab.data.source import Part, regrouped
from fuselab.data.synthetic import SyntheticPart
from fuselab.report.files import replacing

_PIECE_ROWS = 65_536

Floats = numpy.typing.NDArray[numpy.float64]
Ids = numpy.typing.NDArray[numpy.int64]
Frequencies = numpy.typing.NDArray[numpy.uint32]


@dataclass
class CountStatistics:
    """Statistics of the count columns over the present fields, each float64 [13].

    They are the number of present fields, the extremes (infinite if there are none), the mean, the
    sum of squared differences from it, and the sum of log(max(count, 0) + 1).
    """

    present: Floats
    smallest: Floats
    largest: Floats
    mean: Floats
    squares: Floats
    sum_log: Floats

    @classmethod
    def of(cls, counts: Counts) -> CountStatistics:
        values = numpy.where(is_missing(counts), numpy.nan, counts)
        present = numpy.isfinite(values).sum(axis=0, dtype=numpy.float64)
        mean = numpy.nansum(values, axis=0) / numpy.maximum(present, 1)
        return cls(
            present,
            numpy.fmin.reduce(values, axis=0, initial=numpy.inf),
            numpy.fmax.reduce(values, axis=0, initial=-numpy.inf),
            mean,
            numpy.nansum((values - mean) ** 2, axis=0),
            numpy.log1p(numpy.fmax(values, 0)).sum(axis=0),
        )

    def plus(self, other: CountStatistics) -> CountStatistics:
        """Return the statistics of both sets of rows.

        From Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm" (1979).
        """
        present = self.present + other.present
        share = other.present / numpy.maximum(present, 1)
        apart = other.mean - self.mean
        return CountStatistics(
            present,
            numpy.minimum(self.smallest, other.smallest),
            numpy.maximum(self.largest, other.largest),
            self.mean + apart * share,
            self.squares + other.squares + apart**2 * self.present * share,
            self.sum_log + other.sum_log,
        )


class Distinct:
    """The distinct ids of one column, sorted, and how often each occurs (at most 2^32 - 1).

    It takes 12 bytes per id. Added ids wait until they are as many as those merged, so that adding
    up many parts sorts everything only a few times.
    """

    def __init__(self) -> None:
        self._held: tuple[Ids, Frequencies] = (
            numpy.empty(0, numpy.int64),
            numpy.empty(0, numpy.uint32),
        )
        self._waiting: list[tuple[Ids, Frequencies]] = []

    def add(self, values: Ids, frequencies: Frequencies) -> None:
        """Add distinct ids, sorted, with how often each occurs."""
        self._waiting.append((values, frequencies))
        if sum(len(values) for values, _ in self._waiting) >= len(self._held[0]):
            self._merge()

    def add_ids(self, ids: Ids) -> None:
        """Add ids in any order, with repetitions."""
        values, frequencies = numpy.unique(ids, return_counts=True)
        self.add(values, frequencies.astype(numpy.uint32))

    def counted(self) -> tuple[Ids, Frequencies]:
        self._merge()
        return self._held

    def _merge(self) -> None:
        if not self._waiting:
            return
        every = [self._held, *self._waiting]
        values = numpy.concatenate([values for values, _ in every])
        frequencies = numpy.concatenate([frequencies for _, frequencies in every])
        self._waiting = []
        order = numpy.argsort(values, kind="stable")
        values = values[order]
        if not len(values):
            return
        starts = numpy.flatnonzero(numpy.diff(values, prepend=values[0] - 1))
        sums = numpy.add.reduceat(frequencies[order], starts, dtype=numpy.int64)
        self._held = values[starts], numpy.minimum(sums, 2**32 - 1).astype(numpy.uint32)


@dataclass
class Survey:
    """The statistics of some rows.

    These are the number of rows and of positive labels, statistics of the counts, distinct ids of
    every column (with the missing id -1), and the rows that the reader left out.
    """

    rows: int = 0
    positives: int = 0
    counts: CountStatistics = field(
        default_factory=lambda: CountStatistics.of(numpy.empty((0, DENSE_COLUMNS)))
    )
    ids: list[Distinct] = field(default_factory=lambda: [Distinct() for _ in range(SPARSE_COLUMNS)])
    rejects: Rejects = field(default_factory=Rejects)

    def read(self, pieces: Iterable[Rows]) -> None:
        """Add the pieces; their reader reports to ``rejects`` itself."""
        for piece in regrouped(pieces, _PIECE_ROWS):
            self.rows += len(piece)
            self.positives += int(piece.labels.sum())
            self.counts = self.counts.plus(CountStatistics.of(piece.counts))
            for column, distinct in enumerate(self.ids):
                distinct.add_ids(piece.ids[:, column])

    def save(self, path: Path) -> None:
        """Write everything to a file that ``Saved`` reads."""
        numbers = {"rows": self.rows, "positives": self.positives, "rejects": asdict(self.rejects)}
        arrays: dict[str, Any] = {
            "numbers": numpy.array(json.dumps(numbers)),
            "counts": numpy.stack([*vars(self.counts).values()]),
        }
        for column, distinct in enumerate(self.ids):
            arrays[f"values_{column}"], arrays[f"frequencies_{column}"] = distinct.counted()
        with path.open("wb") as file:
            numpy.savez(file, **arrays)


class Saved:
    """A survey in a file; its numbers are loaded at once, its ids when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with numpy.load(path) as arrays:
            numbers = json.loads(str(arrays["numbers"]))
            self.counts = CountStatistics(*arrays["counts"])
        self.rows, self.positives = numbers["rows"], numbers["positives"]
        self.rejects = Rejects(**numbers["rejects"])

    def add_ids_to(self, columns: Sequence[Distinct]) -> None:
        with numpy.load(self.path) as arrays:
            for column, distinct in enumerate(columns):
                distinct.add(arrays[f"values_{column}"], arrays[f"frequencies_{column}"])


@dataclass(frozen=True)
class SurveyTask:
    """The task of surveying the first ``rows`` rows of a part (all if None) into ``output``."""

    part: Part | SyntheticPart
    output: Path
    skip_malformed: bool
    rows: int | None = None


def survey_part(task: SurveyTask) -> int:
    """Survey the part; return the number of rows."""
    survey = Survey(rejects=Rejects(task.skip_malformed))
    survey.read(_first(task.part.read(survey.rejects), task.rows))
    with replacing(task.output) as temporary:
        survey.save(temporary)
    return survey.rows


def added_up(surveys: Sequence[Saved]) -> Survey:
    """Merge the surveys of parts, keeping the order of the source's parts."""
    whole = Survey(counts=total_counts(surveys))
    for survey in surveys:
        whole.rows += survey.rows
        whole.positives += survey.positives
        whole.rejects.add(survey.rejects)
        survey.add_ids_to(whole.ids)
    return whole


def total_counts(surveys: Sequence[Saved]) -> CountStatistics:
    counts = (survey.counts for survey in surveys)
    return functools.reduce(CountStatistics.plus, counts, Survey().counts)


def _first(pieces: Iterator[Rows], rows: int | None) -> Iterator[Rows]:
    """Yield the first ``rows`` rows, or all if None."""
    for piece in pieces:
        if rows is None:
            yield piece
        elif rows > 0:
            yield piece[:rows]
            rows -= len(piece)
