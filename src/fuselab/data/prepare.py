"""Write a source in the prepared format: in parts, in processes, and resumable.

There are two passes over the source. The first surveys every part; from that come the split, the
vocabulary (of training rows only) and the dense statistics. The second writes every part as a
shard. A part's result is written to a temporary file, flushed and renamed, so a file that is there
is whole. A run that was killed, or that filled the disk, continues after the last of them. The
manifest is written last.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy

from fuselab.data import remote
from fuselab.data.dense import TRANSFORMS, Dense
from fuselab.data.description import count_columns, describe_survey
from fuselab.data.ids import Modulus, Vocabulary
from fuselab.data.layout import last_seventh
from fuselab.data.machines import each_on
from fuselab.data.metadata import load_vocabulary, save_vocabulary
from fuselab.data.prepared import MANIFEST, PLAN, SCHEMA, VOCABULARY, Prepared, load_manifest
from fuselab.data.processes import available_cores, each
from fuselab.data.records import RECORD, fill
from fuselab.data.rejects import Rejects
from fuselab.data.source import PART_BYTES, Part, Source
from fuselab.data.survey import (
    CountStatistics,
    Saved,
    SurveyTask,
    added_up,
    survey_part,
    total_counts,
)
from fuselab.data.synthetic import Synthetic, SyntheticPart
from fuselab.errors import ArgumentError, DataError, OutputError, UnknownNameError
from fuselab.report.files import folder_for_results, replacing, write_json
from fuselab.report.progress import Progress

VALIDATIONS = ("auto", "day", "seventh", "none")
_MOST_PARTS = 1024
_VALUES = "vocabulary-values.npy"  # all columns end to end, for the workers to map


def prepare(
    source: str | Path | Synthetic,
    folder: str | Path,
    *,
    ids: str | Modulus | Vocabulary = "modulus",
    min_frequency: int = 1,
    dense: str | Dense = "log1p",
    validation: str = "auto",
    skip_malformed: bool = False,
    processes: int | None = None,
    part_bytes: int = PART_BYTES,
    progress: Progress | None = None,
    scheduler: str | None = None,
) -> Prepared:
    """Write the rows of ``source`` (as ``Source.at`` takes it, or synthetic) into ``folder``, and
    open it.

    If ``folder`` contains an unfinished preparation of the same source and options, its files are
    kept; a finished one is opened as it is.

    Args:
        ids: ``"modulus"`` (the Kaggle set's cardinalities), ``"vocabulary"`` (of the ids that occur
            in at least ``min_frequency`` training rows; all others share one more slot), or a
            Modulus or Vocabulary to use.
        dense: the transform, a ``Dense`` or its name; the smallest values of ``"shifted"`` are
            taken from the training rows.
        validation: the rows put aside: ``"day"`` the last file, ``"seventh"`` the last seventh,
            ``"none"``, ``"auto"`` the last file if there are several, else the last seventh.
        skip_malformed: leave malformed rows out, counted and listed in the manifest.
        processes: how many run at once; all cores by default.
        part_bytes: bytes of a source's text per shard.
        scheduler: the address of a Dask scheduler whose workers do the work, in place of
            processes; they must see source and folder under the same paths.

    Raises DataError for malformed rows and for a source without rows, ArgumentError for options
    that do not fit each other or the folder, OutputError if the folder cannot be written (what was
    written stays, so that a later call can continue).
    """
    remote.refuse_url(folder)
    found = source if isinstance(source, Synthetic) else Source.at(source)
    if scheduler is not None:  # its workers start in folders of their own
        folder = Path(folder).absolute()
        if isinstance(found, Source):
            found = replace(found, files=tuple(file.absolute() for file in found.files))
    _check(found, ids, min_frequency, dense, validation)
    with folder_for_results(folder) as root, _alone(root), _kept():
        identity = found.identity()
        every = max(part_bytes, sum(file["bytes"] for file in identity) // _MOST_PARTS)
        plan = {
            "files": identity,
            "ids": _name_of(ids),
            "min_frequency": min_frequency,
            "dense": asdict(dense) if isinstance(dense, Dense) else {"name": dense},
            "validation": validation,
            "skip_malformed": skip_malformed,
            "part_bytes": every,
        }
        plan = json.loads(json.dumps(plan))
        if (root / MANIFEST).exists():
            _refuse_other(root, load_manifest(root).get("plan"), plan)
            return Prepared(root)
        _begin(root, plan)
        parts = found.parts(every)
        processes = processes or available_cores()
        run = _Run(root, found, parts, skip_malformed, processes, progress, scheduler)
        surveys = run.survey()
        boundary = run.boundary(surveys, validation)
        training = run.training_surveys(surveys, boundary)
        counts = total_counts(training)
        if ids == "vocabulary":
            ids = run.vocabulary(training, min_frequency)
        elif ids == "modulus":
            ids = Modulus()
        assert not isinstance(ids, str)
        if not isinstance(dense, Dense):
            dense = Dense(dense, _smallest(counts) if dense == "shifted" else None)
        run.convert(surveys, ids, dense)
        run.finish(plan, surveys, boundary, ids, dense, counts)
        return Prepared(root)


@dataclass(frozen=True)
class _ConvertTask:
    """The task of writing a part's ``rows`` rows as records.

    ``ids`` may be the sizes of a vocabulary's tables, whose values are then mapped from ``values``.
    """

    part: Part | SyntheticPart
    output: Path
    rows: int
    ids: Modulus | tuple[int, ...]
    values: Path
    dense: Dense
    skip_malformed: bool


def _convert(task: _ConvertTask) -> int:
    """Write the part's records; return the number of rows."""
    ids = task.ids if isinstance(task.ids, Modulus) else _mapped(task.values, task.ids)
    written = 0
    with replacing(task.output) as temporary, temporary.open("wb") as file:
        header = {"descr": RECORD.descr, "fortran_order": False, "shape": (task.rows,)}
        numpy.lib.format.write_array_header_1_0(file, header)
        for piece in task.part.read(Rejects(task.skip_malformed)):
            records = numpy.empty(len(piece), RECORD)
            fill(records, piece, ids, task.dense)
            file.write(records.view(numpy.uint8).data)
            written += len(piece)
        if written != task.rows:
            raise DataError(
                f"{task.part.file} changed while it was read: {task.rows} rows, then {written}; "
                "prepare it again into a new folder when it stays as it is."
            )
    return written


@functools.lru_cache(maxsize=1)
def _mapped(values: Path, sizes: tuple[int, ...]) -> Vocabulary:
    """Map the vocabulary's values; the workers share its pages, 270 MB for the Kaggle set."""
    ends = numpy.cumsum([0, *(size - 1 for size in sizes)]).tolist()
    mapped = numpy.load(values, mmap_mode="r") if ends[-1] else numpy.empty(0, numpy.int64)
    return Vocabulary([mapped[start:stop] for start, stop in pairwise(ends)])


@dataclass(frozen=True)
class _Run:
    """The two passes, each over the parts whose result is missing."""

    root: Path
    source: Source | Synthetic
    parts: Sequence[Part | SyntheticPart]
    skip_malformed: bool
    processes: int
    progress: Progress | None
    scheduler: str | None

    def survey(self) -> list[Saved]:
        outputs = [self.root / f"survey-{number:05}.npz" for number in range(len(self.parts))]
        tasks = [
            SurveyTask(part, output, self.skip_malformed)
            for part, output in zip(self.parts, outputs, strict=True)
        ]
        self._walk("survey", survey_part, tasks)
        return [Saved(output) for output in outputs]

    def boundary(self, surveys: Sequence[Saved], validation: str) -> int:
        """Return the index of the first validation row."""
        total: int = sum(survey.rows for survey in surveys)
        if not total:
            raise DataError(f"{self.source.path} holds no complete row.")
        if validation == "none":
            return total
        days = len(self.source.files)
        if validation == "seventh" or (validation == "auto" and days == 1):
            return last_seventh(total)
        last = self.source.files[-1]
        kept = [
            survey.rows
            for part, survey in zip(self.parts, surveys, strict=True)
            if part.file != last
        ]
        return sum(kept)

    def training_surveys(self, surveys: Sequence[Saved], boundary: int) -> list[Saved]:
        """Return the surveys of the rows before ``boundary``; the part it cuts is surveyed up to
        there."""
        training = []
        left = boundary
        for part, survey in zip(self.parts, surveys, strict=True):
            if 0 < left < survey.rows:
                output = self.root / "survey-boundary.npz"
                task = SurveyTask(part, output, self.skip_malformed, left)
                self._walk("survey", survey_part, [task])
                survey = Saved(output)
            if left > 0:
                training.append(survey)
            left -= survey.rows
        return training

    def vocabulary(self, training: Sequence[Saved], min_frequency: int) -> Vocabulary:
        path = self.root / VOCABULARY
        if not path.exists():
            counted = [distinct.counted() for distinct in added_up(training).ids]
            frequent = [ids[frequencies >= min_frequency] for ids, frequencies in counted]
            save_vocabulary(path, Vocabulary(frequent))
        return load_vocabulary(path)

    def convert(self, surveys: Sequence[Saved], ids: Modulus | Vocabulary, dense: Dense) -> None:
        values = self.root / _VALUES
        told: Modulus | tuple[int, ...]
        if isinstance(ids, Vocabulary):
            told = ids.cardinalities
            if not (self.root / VOCABULARY).exists():
                save_vocabulary(self.root / VOCABULARY, ids)
            with replacing(values) as temporary:
                numpy.save(temporary, numpy.concatenate(ids.values))
        else:
            told = ids
        tasks = [
            _ConvertTask(part, output, survey.rows, told, values, dense, self.skip_malformed)
            for part, output, survey in zip(self.parts, self._shards(), surveys, strict=True)
            if survey.rows
        ]
        self._walk("write", _convert, tasks)

    def finish(
        self,
        plan: dict[str, Any],
        surveys: Sequence[Saved],
        boundary: int,
        ids: Modulus | Vocabulary,
        dense: Dense,
        counts: CountStatistics,
    ) -> None:
        """Write the manifest, then remove the files that it makes superfluous."""
        description = describe_survey(
            self.source.path, added_up(surveys), Modulus(ids.cardinalities)
        )
        manifest = {
            "schema": SCHEMA,
            "rows": description.rows,
            "validation_first": boundary,
            "ids": "vocabulary" if isinstance(ids, Vocabulary) else "modulus",
            "cardinalities": ids.cardinalities,
            "dense": dense,
            "training_counts": count_columns(boundary, counts),
            "shards": [
                {"file": path.name, "rows": survey.rows}
                for path, survey in zip(self._shards(), surveys, strict=True)
                if survey.rows
            ],
            "description": description,
            "plan": plan,
        }
        write_json(self.root / MANIFEST, manifest)
        for path in (self.root / PLAN, self.root / _VALUES, *self.root.glob("survey-*.npz")):
            path.unlink(missing_ok=True)

    def _shards(self) -> list[Path]:
        return [self.root / f"rows-{number:05}.npy" for number in range(len(self.parts))]

    def _walk(self, what: str, work: Callable[[Any], int], tasks: Sequence[Any]) -> None:
        left = [task for task in tasks if not task.output.exists()]
        if self.progress is not None and left:
            self.progress.begin(f"{what}:", len(left))
        walk = (
            each(work, left, self.processes)
            if self.scheduler is None
            else each_on(self.scheduler, work, left)
        )
        for _, rows in walk:
            if self.progress is not None:
                self.progress.update(rows)


# --- before the work -----------------------------------------------------------------------------


def _check(
    source: Source | Synthetic,
    ids: str | Modulus | Vocabulary,
    min_frequency: int,
    dense: str | Dense,
    validation: str,
) -> None:
    if isinstance(ids, str) and ids not in ("modulus", "vocabulary"):
        raise UnknownNameError("kind of ids", ids, ("modulus", "vocabulary"))
    if validation not in VALIDATIONS:
        raise UnknownNameError("validation", validation, VALIDATIONS)
    if validation == "day" and len(source.files) == 1:
        raise ArgumentError(
            f"{source.path} is one file: its last day is not known; take validation 'seventh', or "
            "give the days as files."
        )
    if isinstance(dense, str) and dense not in TRANSFORMS:
        raise UnknownNameError("dense transform", dense, TRANSFORMS)
    if min_frequency < 1:
        raise ArgumentError(f"min_frequency is {min_frequency}; expected at least 1.")
    if min_frequency > 1 and ids != "vocabulary":
        raise ArgumentError("min_frequency is for a vocabulary that is built; take ids vocabulary.")


@contextlib.contextmanager
def _alone(root: Path) -> Iterator[None]:
    """Lock the folder, and remove the temporary files of killed processes.

    Raises ArgumentError if another process is preparing the folder.
    """
    folder = os.open(root, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _clear(root)
        try:
            yield
        except KeyboardInterrupt:
            _clear(root)
            raise
    except BlockingIOError:
        raise ArgumentError(
            f"{root} is being prepared by another process; wait for it, or give another folder."
        ) from None
    finally:
        os.close(folder)  # this also releases the lock


def _clear(root: Path) -> None:
    if (root / PLAN).exists():
        for left in root.glob(".fuselab-*"):
            left.unlink(missing_ok=True)


@contextlib.contextmanager
def _kept() -> Iterator[None]:
    """Add to an OutputError how to continue the preparation."""
    try:
        yield
    except OutputError as error:
        raise OutputError(
            f"{error} What is prepared so far is kept: the same command goes on from there."
        ) from error


def _begin(root: Path, plan: dict[str, Any]) -> None:
    path = root / PLAN
    there: Any = None
    with contextlib.suppress(OSError, ValueError):
        there = json.loads(path.read_text())
    if there == plan:
        return
    others = [name for name in os.listdir(root) if name != PLAN]
    if others and path.exists():
        _refuse_other(root, there, plan)
    if others:
        raise ArgumentError(
            f"{root} is not empty (it holds {min(others)}) and no preparation; give a new folder."
        )
    # Replaces a plan without results, whose source was refused and has been corrected since.
    write_json(path, plan)


def _refuse_other(root: Path, there: Any, plan: dict[str, Any]) -> None:
    if there == plan:
        return
    differing = [key for key in plan if not isinstance(there, dict) or there.get(key) != plan[key]]
    raise ArgumentError(
        f"{root} holds a preparation with other {', '.join(differing)}; give another folder, or "
        "delete this one."
    )


def _name_of(ids: str | Modulus | Vocabulary) -> Any:
    if isinstance(ids, str):
        return ids
    if isinstance(ids, Modulus):
        return list(ids.cardinalities)
    digest = hashlib.sha256()
    for values in ids.values:
        digest.update(len(values).to_bytes(8, "little") + numpy.ascontiguousarray(values).data)
    return digest.hexdigest()


def _smallest(counts: CountStatistics) -> tuple[float, ...]:
    """Return the smallest counts of the training rows; a missing count is taken as 0."""
    return tuple(numpy.minimum(counts.smallest, 0.0).tolist())
