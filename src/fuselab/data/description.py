"""A description of rows: their number, positives, and columns, and collisions under the modulus."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from fuselab.data import remote
from fuselab.data.ids import Modulus
from fuselab.data.layout import MISSING_ID, column_name
from fuselab.data.prepared import is_prepared, load_manifest
from fuselab.data.processes import available_cores, each
from fuselab.data.source import Source
from fuselab.data.survey import (
    CountStatistics,
    Distinct,
    Saved,
    Survey,
    SurveyTask,
    added_up,
    survey_part,
)
from fuselab.errors import DataError, OutputError
from fuselab.report.progress import Progress


@dataclass(frozen=True)
class CountColumn:
    """One integer column; missing fields do not count in the rest (None if all are missing)."""

    name: str
    missing: int
    smallest: float | None
    largest: float | None
    mean: float | None
    std: float | None
    mean_log: float | None  # mean of log(max(count, 0) + 1)


@dataclass(frozen=True)
class IdColumn:
    """One categorical column, without missing ids.

    ``cardinality`` counts the distinct ids; ``top_share`` is the share of all rows with the most
    frequent id. Under ``(id + 1) % table`` the ids fall into ``slots`` slots, ``colliding`` of them
    share a slot with another id, and the fullest slot gets ``fullest_share`` of all rows. If that
    equals ``top_share``, the modulus adds no skew.
    """

    name: str
    missing: int
    cardinality: int
    top_share: float
    table: int
    slots: int
    colliding: int
    fullest_share: float

    @property
    def skew(self) -> float:
        """The rows in the fullest slot over the mean of the occupied ones; 1 is even."""
        return self.fullest_share * self.slots


@dataclass(frozen=True)
class Description:
    """The description of a whole source.

    ``rejected`` malformed rows were left out; ``left_out`` lists them (the first hundred, and last
    lines that stop short).
    """

    file: str
    rows: int
    positives: int
    counts: tuple[CountColumn, ...]
    ids: tuple[IdColumn, ...]
    rejected: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def label_rate(self) -> float:
        return self.positives / self.rows

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Description:
        """Rebuild the description from the result of ``dataclasses.asdict``."""
        return cls(
            **{
                **saved,
                "counts": tuple(CountColumn(**column) for column in saved["counts"]),
                "ids": tuple(IdColumn(**column) for column in saved["ids"]),
                "left_out": tuple(saved["left_out"]),
            }
        )


def describe(
    path: str | Path,
    *,
    modulus: Modulus | None = None,
    skip_malformed: bool = False,
    processes: int | None = None,
    progress: Progress | None = None,
) -> Description:
    """Describe everything at ``path``, exactly.

    It is read once in ``processes`` processes (default: all cores); for a prepared folder, the
    description that ``prepare`` saved is returned. ``modulus`` (default: the Kaggle set's
    cardinalities) is the one whose collisions are counted; a prepared folder was described with its
    own. Memory grows with the distinct ids (12 bytes each), not with the rows. Raises DataError as
    ``Source`` does.
    """
    if is_prepared(path):
        return Description.from_json(load_manifest(remote.local(path))["description"])
    with _temporary_folder() as folder:
        tasks = [
            SurveyTask(part, folder / f"{number}.npz", skip_malformed)
            for number, part in enumerate(Source.at(path).parts())
        ]
        if progress is not None:
            progress.begin("read:", len(tasks))
        for _, rows in each(_survey_aside, tasks, processes or available_cores()):
            if progress is not None:
                progress.update(rows)
        survey = added_up([Saved(task.output) for task in tasks])
    return describe_survey(str(path), survey, modulus or Modulus())


@contextlib.contextmanager
def _temporary_folder() -> Iterator[Path]:
    with contextlib.ExitStack() as closing:
        try:
            folder = closing.enter_context(tempfile.TemporaryDirectory())
        except OSError as error:
            raise OutputError(f"{error.strerror or error}; set TMPDIR to one.") from error
        yield Path(folder)


def _survey_aside(task: SurveyTask) -> int:
    """Run ``survey_part`` into a temporary folder, whose errors mention TMPDIR."""
    try:
        return survey_part(task)
    except OutputError as error:
        if str(task.output) not in str(error):
            raise
        raise OutputError(f"{error} TMPDIR names the folder of temporary files.") from error


def describe_survey(name: str, survey: Survey, modulus: Modulus) -> Description:
    """Describe a survey. Raises DataError if it has no row."""
    if not survey.rows:
        raise DataError(f"{name} holds no complete row.")
    return Description(
        name,
        survey.rows,
        survey.positives,
        count_columns(survey.rows, survey.counts),
        tuple(
            id_column(column, survey.rows, distinct, table)
            for column, (distinct, table) in enumerate(
                zip(survey.ids, modulus.cardinalities, strict=True)
            )
        ),
        survey.rejects.count,
        (*survey.rejects.sentences, *survey.rejects.cut),
    )


def count_columns(rows: int, counts: CountStatistics) -> tuple[CountColumn, ...]:
    """Return the statistics of the 13 count columns over ``rows`` rows."""
    columns = []
    for column, present in enumerate(counts.present):
        found: Sequence[float | None] = (None,) * 5
        if present:
            std = (counts.squares[column] / present) ** 0.5
            found = [
                _plain(value)
                for value in (
                    counts.smallest[column],
                    counts.largest[column],
                    counts.mean[column],
                    std,
                    counts.sum_log[column] / present,
                )
            ]
        columns.append(CountColumn(column_name(1 + column), rows - int(present), *found))
    return tuple(columns)


def id_column(column: int, rows: int, distinct: Distinct, table: int) -> IdColumn:
    """Return the statistics of one id column over ``rows`` rows; the missing id takes slot 0, as in
    a table."""
    values, frequencies = distinct.counted()
    slots, slot_of = numpy.unique((values + 1) % table, return_inverse=True)
    load = numpy.bincount(slot_of, weights=frequencies)
    present = values != MISSING_ID
    shared = numpy.bincount(slot_of)[slot_of] > 1
    return IdColumn(
        column_name(14 + column),
        int(frequencies[~present].sum()),
        int(present.sum()),
        float(frequencies[present].max(initial=0)) / rows,
        table,
        len(slots),
        int((shared & present).sum()),
        float(load.max(initial=0.0)) / rows,
    )


def _plain(value: float) -> float:
    """Return a whole number as an integer, as the file has it."""
    return int(value) if float(value).is_integer() else float(value)
