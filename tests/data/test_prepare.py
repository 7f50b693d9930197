"""Prepared rows against plain Python; stopped at any point and begun again; folders not whole."""

from __future__ import annotations

import errno
import gzip
import json
import math
import os
import re
import resource
import signal
import time
import warnings
from pathlib import Path

import numpy
import pytest
from criteo_rows import line, real_sample, replaced

from fuselab.cli.main import run
from fuselab.data import MISSING_COUNT, Dense, Modulus, Vocabulary, describe, pieces, synthesize
from fuselab.data import prepare as prepare_module
from fuselab.data.layout import Rows, concatenate
from fuselab.data.prepare import prepare
from fuselab.data.prepared import Prepared
from fuselab.data.records import RECORD
from fuselab.data.source import Source
from fuselab.data.synthetic import PART_ROWS, Synthetic
from fuselab.errors import ArgumentError, DataError, FuselabError, OutputError, UnknownNameError

ROWS = 700
SMALL = 50_000  # bytes a part: some 220 rows


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source") / "rows.tsv"
    synthesize(path, ROWS, seed=4)
    return path


@pytest.fixture(scope="module")
def drawn() -> Rows:
    return concatenate(list(pieces(ROWS, seed=4)))


def records(prepared: Prepared, first: int = 0, rows: int | None = None) -> numpy.ndarray:
    out = numpy.empty(prepared.rows - first if rows is None else rows, RECORD)
    prepared.read_into(out, first)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted(folder.iterdir())}


# --- what is written -----------------------------------------------------------------------------


def test_modulus_and_log_row_by_row(tmp_path: Path, source: Path, drawn: Rows) -> None:
    prepared = prepare(source, tmp_path / "out", processes=1, part_bytes=SMALL)
    assert len(prepared.shards) == 4
    found = records(prepared)
    assert found["label"].tolist() == drawn.labels.tolist()
    counts = numpy.where(drawn.counts == MISSING_COUNT, 0, drawn.counts)
    assert found["dense"] == pytest.approx(numpy.log(numpy.maximum(counts, 0) + 1), rel=1e-6)
    assert numpy.array_equal(
        found["sparse"], (drawn.ids + 1) % numpy.array(Modulus().cardinalities)
    )
    assert prepared.cardinalities == Modulus().cardinalities
    assert prepared.validation_first == ROWS - ROWS // 7
    # Any window, over the edges of shards.
    for first, rows in ((0, 1), (218, 5), (ROWS - 1, 1), (1, ROWS - 2), (500, 0)):
        assert records(prepared, first, rows).tobytes() == found[first : first + rows].tobytes()


def test_a_shard_opens_with_numpy_alone(tmp_path: Path, source: Path, drawn: Rows) -> None:
    prepare(source, tmp_path / "out", processes=1)
    shard = numpy.load(tmp_path / "out" / "rows-00000.npy", mmap_mode="r")
    assert shard["label"].tolist() == drawn.labels.tolist()
    assert shard["sparse"].shape == (ROWS, 26)


def test_a_vocabulary_is_that_of_frequent_ids_of_training_rows(
    tmp_path: Path, source: Path, drawn: Rows
) -> None:
    prepared = prepare(
        source, tmp_path / "out", ids="vocabulary", min_frequency=3, processes=1, part_bytes=SMALL
    )
    found = records(prepared)["sparse"]
    training = drawn.ids[: ROWS - ROWS // 7]
    for column in range(26):
        values, counts = numpy.unique(training[:, column], return_counts=True)
        known = values[counts >= 3].tolist()
        places = {value: place for place, value in enumerate(known)}
        wanted = [places.get(value, len(known)) for value in drawn.ids[:, column].tolist()]
        assert found[:, column].tolist() == wanted
        assert prepared.cardinalities[column] == len(known) + 1
    assert isinstance(prepared.ids(), Vocabulary)
    assert prepared.ids().indices(drawn.ids).tolist() == found.tolist()


def test_the_shifted_transform_takes_its_minima_from_training_rows(tmp_path: Path) -> None:
    counts = [5, -4, 2, 3, 1, 7, -9]  # the last is the validation row
    path = tmp_path / "a.tsv"
    path.write_text("".join(replaced(2, str(count)) + "\n" for count in counts))
    prepared = prepare(path, tmp_path / "out", dense="shifted", processes=1)
    wanted = [math.log(max(count, -4) + 6) for count in counts]
    assert records(prepared)["dense"][:, 0] == pytest.approx(wanted)
    assert prepared.dense() == Dense("shifted", (-4.0, -2.0, *[0.0] * 11))
    assert prepared.manifest["training_counts"][0]["largest"] == 7
    assert prepared.manifest["training_counts"][0]["mean"] == pytest.approx(sum(counts[:6]) / 6)


def test_the_last_file_is_the_validation_day(tmp_path: Path) -> None:
    for day in range(3):
        synthesize(tmp_path / f"day_{day}.gz", 40 + day, seed=day)
    glob = f"{tmp_path}/day_*.gz"
    wanted = {"auto": 81, "day": 81, "seventh": 123 - 17, "none": 123}
    for validation, boundary in wanted.items():
        prepared = prepare(glob, tmp_path / validation, validation=validation, processes=1)
        assert (prepared.rows, prepared.validation_first) == (123, boundary)


def test_the_description_is_the_sources(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "out", processes=1, part_bytes=SMALL)
    found, wanted = describe(tmp_path / "out"), describe(source)
    assert (found.ids, found.positives) == (wanted.ids, wanted.positives)
    for column, other in zip(found.counts, wanted.counts, strict=True):
        assert column.std == pytest.approx(other.std)
        assert (column.missing, column.smallest, column.largest) == (
            other.missing, other.smallest, other.largest,
        )  # fmt: skip


def test_several_processes_write_the_same_bytes(tmp_path: Path, source: Path) -> None:
    options = {"ids": "vocabulary", "part_bytes": 90_000}
    prepare(source, tmp_path / "one", processes=1, **options)
    prepare(source, tmp_path / "two", processes=2, **options)
    assert content(tmp_path / "one") == content(tmp_path / "two")


def test_synthetic_rows_need_no_file(tmp_path: Path) -> None:
    prepared = prepare(Synthetic(PART_ROWS // 16 + 3, 9), tmp_path / "out", processes=1)
    drawn = concatenate(list(pieces(PART_ROWS // 16 + 3, seed=9)))
    assert records(prepared)["label"].tolist() == drawn.labels.tolist()
    assert numpy.array_equal(records(prepared)["sparse"], Modulus().indices(drawn.ids))


def test_real_rows(tmp_path: Path) -> None:
    prepared = prepare(real_sample(), tmp_path / "out", processes=1)
    found = records(prepared)
    texts = [text.split("\t") for text in real_sample().read_text().splitlines()]
    assert found["label"].tolist() == [float(fields[0]) for fields in texts]
    assert found["sparse"][:, 2].tolist() == [
        (int(fields[16] or "-1", 16) + 1) % 10_131_227 for fields in texts
    ]


@pytest.mark.parametrize("rows", [1, 6, 7])
def test_few_rows(tmp_path: Path, rows: int) -> None:
    (tmp_path / "a.tsv").write_text((line() + "\n") * rows)
    for ids in ("modulus", "vocabulary"):
        prepared = prepare(tmp_path / "a.tsv", tmp_path / ids, ids=ids, processes=1)
        assert (prepared.rows, prepared.validation_first) == (rows, rows - rows // 7)
        assert len(records(prepared)) == rows


def test_rows_of_nothing_but_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text(("0" + 39 * "\t" + "\n") * 8)
    found = records(prepare(tmp_path / "a.tsv", tmp_path / "out", processes=1))
    assert not found["dense"].any()
    assert not found["sparse"].any()
    described = describe(tmp_path / "out")
    assert {column.missing for column in (*described.counts, *described.ids)} == {8}
    assert {(column.cardinality, column.top_share) for column in described.ids} == {(0, 0.0)}
    prepared = prepare(tmp_path / "a.tsv", tmp_path / "known", ids="vocabulary", processes=1)
    assert prepared.cardinalities == (2,) * 26  # missing, and one for all others
    assert not records(prepared)["sparse"].any()


def test_every_spelling_of_the_same_rows(tmp_path: Path, source: Path) -> None:
    text = source.read_bytes()
    spellings = {
        "unix.tsv": text,
        "windows.tsv": text.replace(b"\n", b"\r\n"),
        "open.tsv": text.removesuffix(b"\n"),
        "packed.tsv.gz": gzip.compress(text),
    }
    found = set()
    for name, spelling in spellings.items():
        (tmp_path / name).write_bytes(spelling)
        prepared = prepare(tmp_path / name, tmp_path / f"out {name}", processes=1, part_bytes=SMALL)
        found.add(records(prepared).tobytes())
    assert len(found) == 1
    (tmp_path / "cut.gz").write_bytes(spellings["packed.tsv.gz"][:-500])
    with pytest.raises(DataError, match=r"cut\.gz is not a whole gzip file"):
        prepare(tmp_path / "cut.gz", tmp_path / "out", processes=1)


# --- malformed rows ------------------------------------------------------------------------------


def test_skipped_rows_are_in_the_manifest(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    lines = [replaced(1, "2") if number in (3, 40) else line() for number in range(50)]
    path.write_text("".join(text + "\n" for text in lines) + "0\t1")
    with pytest.raises(DataError, match="line 4, column 1"):
        prepare(path, tmp_path / "out", processes=1, part_bytes=1000)
    prepared = prepare(path, tmp_path / "skip", skip_malformed=True, processes=1, part_bytes=1000)
    found = prepared.manifest["description"]
    assert (prepared.rows, found["rows"], found["rejected"]) == (48, 48, 2)
    lines_named = [text.split(", line ")[1].partition(":")[0] for text in found["left_out"]]
    assert [name.split(",")[0] for name in lines_named] == ["4", "41", "51"]


def test_nothing_but_malformed_rows(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_text("a\tb\n" * 3)
    with pytest.raises(DataError, match="holds no complete row"):
        prepare(tmp_path / "a.tsv", tmp_path / "out", skip_malformed=True, processes=1)


# --- stopped and begun again ---------------------------------------------------------------------


@pytest.mark.parametrize("ids", ["modulus", "vocabulary"])
def test_a_full_disk_loses_nothing(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, ids: str
) -> None:
    """The disk is full at every file in turn; the second run does the rest and no more."""
    replace, done, room = os.replace, [], 10**9

    def filling(old: Path, new: Path) -> None:
        if len(done) == room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(old, new)
        done.append(Path(new).name)

    monkeypatch.setattr(os, "replace", filling)
    options = {"ids": ids, "processes": 1, "part_bytes": SMALL}
    prepare(source, tmp_path / "whole", **options)
    files = list(done)
    assert (files[0], files[-1]) == ("plan.json", "manifest.json")
    for number, stop in enumerate(files):
        out = tmp_path / str(number)
        done, room = [], number
        with pytest.raises(
            OutputError, match=r"disk is full.* the same command goes on from there"
        ):
            prepare(source, out, **options)
        assert done == files[:number]
        if number:
            assert not [name for name in os.listdir(out) if name.startswith(".")]
            with pytest.raises(DataError, match="the preparation did not finish"):
                Prepared(out)
        done, room = [], 10**9
        prepare(source, out, **options)
        again = ["vocabulary-values.npy"] if "vocabulary-values.npy" in files[:number] else []
        assert sorted(done) == sorted([*again, *files[number:]]), stop
        assert content(out) == content(tmp_path / "whole")


def test_a_write_that_fails_midway_leaves_no_file(tmp_path: Path, source: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # the survey has 91,000 bytes
    try:
        with pytest.raises(OutputError, match=r"too large.* the same command goes on from there"):
            prepare(source, tmp_path / "out", processes=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert os.listdir(tmp_path / "out") == ["plan.json"]


def test_ctrl_c_is_answered_and_gone_on_from(
    tmp_path: Path,
    source: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(task: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(prepare_module, "_convert", interrupt)
    command = ["data", "prepare", str(source), "-o", str(tmp_path / "out"), "--processes", "1"]
    assert run(command) == 130
    assert "interrupted; what is prepared so far is kept" in capsys.readouterr().err
    monkeypatch.undo()
    assert run(command) == 0
    assert "survey" not in capsys.readouterr().err  # it was kept


@pytest.mark.parametrize("parts", [1, 4, 6])
def test_killed_and_begun_again(tmp_path: Path, source: Path, parts: int) -> None:
    prepare(source, tmp_path / "whole", processes=1, part_bytes=SMALL)
    out = tmp_path / "out"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12: a fork of a threaded process
        child = os.fork()
    if child == 0:
        try:
            prepare(source, out, processes=1, part_bytes=SMALL)
        finally:
            os._exit(0)
    end = time.monotonic() + 60
    while time.monotonic() < end:
        made = [*out.glob("survey-*.npz"), *out.glob("rows-*.npy")]
        if len(made) >= parts or (out / "manifest.json").exists():
            break
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not (out / "manifest.json").exists():
        with pytest.raises(DataError, match="the preparation did not finish"):
            Prepared(out)
    prepare(source, out, processes=1, part_bytes=SMALL)
    assert content(out) == content(tmp_path / "whole")


@pytest.mark.parametrize("plan", [None, "", "[]"])
def test_a_plan_that_nothing_came_of_is_no_preparation(tmp_path: Path, plan: str | None) -> None:
    """A source that was refused is mended, and the same command goes on."""
    path, out = tmp_path / "a.tsv", tmp_path / "out"
    path.write_text(replaced(1, "2") + "\n")
    with pytest.raises(DataError, match="line 1, column 1"):
        prepare(path, out, processes=1)
    if plan is not None:  # damaged
        (out / "plan.json").write_text(plan)
    path.write_text(line() + "\n" + line() + "\n")
    assert prepare(path, out, processes=1).rows == 2


def test_a_finished_folder_is_opened_not_written(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "out", processes=1)
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()}
    prepare(source, tmp_path / "out", processes=1)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "out").iterdir()} == before


def test_other_options_or_another_source_are_refused(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    monkeypatch.setattr(prepare_module, "_convert", lambda task: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepare(source, out, processes=1)
    monkeypatch.undo()
    with pytest.raises(ArgumentError, match="holds a preparation with other dense"):
        prepare(source, out, dense="log3", processes=1)
    prepare(source, out, processes=1)
    with pytest.raises(ArgumentError, match="with other ids, min_frequency"):
        prepare(source, out, ids="vocabulary", min_frequency=2, processes=1)
    synthesize(tmp_path / "rows.tsv", 10)
    with pytest.raises(ArgumentError, match="with other files"):
        prepare(tmp_path / "rows.tsv", out, processes=1)


def test_a_folder_of_something_else_and_one_in_use_are_refused(
    tmp_path: Path, source: Path
) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ArgumentError, match=r"is not empty \(it holds notes.txt\)"):
        prepare(source, tmp_path, processes=1)
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]
    out = tmp_path / "out"
    out.mkdir()
    with prepare_module._alone(out), pytest.raises(ArgumentError, match="by another process"):
        prepare(source, out, processes=1)


def test_a_source_that_changes_between_the_walks_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.tsv"
    path.write_text((line() + "\n") * 20)
    kept = prepare_module._convert

    def convert(task: object) -> int:
        path.write_text((line() + "\n") * 10)
        return kept(task)

    monkeypatch.setattr(prepare_module, "_convert", convert)
    with pytest.raises(DataError, match="changed while it was read: 20 rows, then 10"):
        prepare(path, tmp_path / "out", processes=1)


# --- calls and folders that are wrong ------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"ids": "hash"}, UnknownNameError, "unknown kind of ids 'hash'"),
        ({"dense": "log2"}, UnknownNameError, "unknown dense transform 'log2'"),
        ({"validation": "week"}, UnknownNameError, "unknown validation 'week'"),
        ({"validation": "day"}, ArgumentError, "is one file: its last day is not known"),
        ({"min_frequency": 0, "ids": "vocabulary"}, ArgumentError, "min_frequency is 0"),
        ({"min_frequency": 2}, ArgumentError, "is for a vocabulary that is built"),
    ],
)
def test_bad_options(tmp_path: Path, source: Path, options, kind, says: str) -> None:
    with pytest.raises(kind, match=says):
        prepare(source, tmp_path / "out", processes=1, **options)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda out: (out / "manifest.json").unlink(), "holds no manifest.json"),
        (lambda out: (out / "manifest.json").write_text("{"), "manifest.json cannot be read"),
        (
            lambda out: (out / "manifest.json").write_text('{"schema": 2}'),
            "has schema 2",
        ),
        (lambda out: (out / "manifest.json").write_text('{"schema": 1}'), "lacks 'cardinalities'"),
        (lambda out: (out / "rows-00000.npy").unlink(), "rows-00000.npy cannot be read"),
        (lambda out: os.truncate(out / "rows-00000.npy", 5000), "is not the 700 records"),
        (lambda out: os.truncate(out / "rows-00000.npy", 3), "rows-00000.npy cannot be read"),
        (lambda out: numpy.save(out / "rows-00000.npy", numpy.zeros(3)), "is not the 700 records"),
    ],
)
def test_a_folder_that_is_not_whole(tmp_path: Path, source: Path, harm, says: str) -> None:
    prepare(source, tmp_path / "out", processes=1)
    harm(tmp_path / "out")
    with pytest.raises(DataError, match=says):
        Prepared(tmp_path / "out")


def test_a_shard_cut_while_it_is_read(tmp_path: Path, source: Path) -> None:
    prepared = prepare(source, tmp_path / "out", processes=1)
    os.truncate(tmp_path / "out" / "rows-00000.npy", 5000)
    with pytest.raises(DataError, match="ends early"):
        records(prepared)


@pytest.mark.parametrize("index", [2**30, -7])
@pytest.mark.parametrize("row", [5, 63, 64, 66])  # rows are checked 32 at a time, then the rest
def test_an_id_beyond_its_table(tmp_path: Path, source: Path, index: int, row: int) -> None:
    prepare(source, tmp_path / "out", processes=1)
    shard = tmp_path / "out" / "rows-00000.npy"
    records = numpy.load(shard)
    records["sparse"][row, 25] = index
    numpy.save(shard, records)
    prepared = Prepared(tmp_path / "out")
    out = numpy.empty(67, dtype=RECORD)
    prepared.read_into(out[:row], 0)
    prepared.read_into(out[:4], row + 1)
    size = prepared.cardinalities[25]
    with pytest.raises(
        DataError, match=f"row {row + 1}: C26 has {index}, and its table {size} rows"
    ):
        prepared.read_into(out, 0)


@pytest.mark.parametrize("label", [2, -1, 0.5, math.nan, math.inf])
def test_a_label_that_is_not_0_or_1(tmp_path: Path, source: Path, label: float) -> None:
    prepare(source, tmp_path / "out", processes=1)
    shard = tmp_path / "out" / "rows-00000.npy"
    records = numpy.load(shard)
    records["label"][5] = label
    numpy.save(shard, records)
    out = numpy.empty(4, dtype=RECORD)
    Prepared(tmp_path / "out").read_into(out, 6)
    says = f"rows-00000.npy, row 6: the label is {label:g}; expected 0 or 1"
    with pytest.raises(DataError, match=re.escape(says)):
        Prepared(tmp_path / "out").read_into(out, 3)


def test_a_folder_that_cannot_be_written(tmp_path: Path, source: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="is a file"):
        prepare(source, tmp_path / "file", processes=1)
    with pytest.raises(FuselabError, match="no file"):
        prepare(tmp_path / "gone.tsv", tmp_path / "out", processes=1)
    assert not (tmp_path / "out").exists()


def test_a_manifest_made_by_hand(tmp_path: Path, source: Path) -> None:
    """Rows alone can be read; what it does not say of ids and counts is one sentence."""
    folder = prepare(source, tmp_path / "out").folder
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["ids"], manifest["dense"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    prepared = Prepared(folder)
    assert prepared.rows == ROWS
    for asked, lacking in ((prepared.ids, "ids"), (prepared.dense, "dense")):
        with pytest.raises(DataError, match=rf"manifest\.json lacks '{lacking}'"):
            asked()


def test_the_manifest_is_json_with_a_schema(tmp_path: Path, source: Path) -> None:
    prepare(source, tmp_path / "out", processes=1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["schema"] == 1
    assert manifest["shards"] == [{"file": "rows-00000.npy", "rows": ROWS}]
    assert Source.at(source).identity() == manifest["plan"]["files"]
