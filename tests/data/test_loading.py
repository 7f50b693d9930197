"""Compiled reading and ordering: the same as in numpy, and the same refusals."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy
import pytest

from fuselab.data import loading
from fuselab.data.prepared import SCHEMA, Prepared
from fuselab.data.records import RECORD
from fuselab.data.shuffle import permutation
from fuselab.errors import BuildError, DataError

ROWS = 4000  # more than two pieces of loading.cpp
SIZE = 7


@pytest.fixture(params=[True, False], ids=["compiled", "numpy"])
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(loading, "compiled", lambda: request.param)
    return bool(request.param)


def records() -> numpy.ndarray:
    rows = numpy.zeros(ROWS, RECORD)
    rows["dense"] = numpy.arange(ROWS * 13).reshape(ROWS, 13)
    rows["label"] = numpy.arange(ROWS) % 2
    rows["sparse"] = numpy.arange(ROWS)[:, None] % SIZE
    return rows


def prepared(folder: Path, rows: numpy.ndarray) -> Prepared:
    numpy.save(folder / "rows.npy", rows)
    manifest = {
        "schema": SCHEMA,
        "cardinalities": [SIZE] * 26,
        "validation_first": len(rows),
        "shards": [{"file": "rows.npy", "rows": len(rows)}],
    }
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return Prepared(folder)


def test_it_is_compiled_where_there_is_a_compiler() -> None:
    assert loading.compiled()


def test_without_a_compiler_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(expressions: tuple[str, ...]) -> None:
        raise BuildError("no compiler")

    monkeypatch.setattr(loading.SOURCE, "prebuild", fails)
    assert not loading.compiled.__wrapped__()


@pytest.mark.parametrize(("first", "count"), [(0, ROWS), (1, 1), (1535, 2), (1537, 1536), (5, 0)])
def test_any_rows(tmp_path: Path, compiled: bool, first: int, count: int) -> None:
    rows = records()
    rows["label"][first] = -0.0
    out = numpy.empty(count, RECORD)
    prepared(tmp_path, rows).read_into(out, first)
    assert out.tobytes() == rows[first : first + count].tobytes()


@pytest.mark.parametrize("row", [0, 1535, 1536, ROWS - 1])
@pytest.mark.parametrize("label", [2.0, -1.0, 0.5, float("nan"), float("inf")])
def test_a_wrong_label(tmp_path: Path, compiled: bool, row: int, label: float) -> None:
    rows = records()
    rows["label"][row:] = label  # the first in order is named
    with pytest.raises(DataError, match=rf"row {row + 1}: the label is {label:g};"):
        prepared(tmp_path, rows).read_into(numpy.empty(ROWS, RECORD), 0)


@pytest.mark.parametrize("row", [0, 1535, 1536, ROWS - 1])
@pytest.mark.parametrize("index", [SIZE, -1])
def test_an_index_beyond_its_table(tmp_path: Path, compiled: bool, row: int, index: int) -> None:
    rows = records()
    rows["sparse"][row:, 25] = index
    with pytest.raises(DataError, match=rf"row {row + 1}: C26 has {index}, and its table 7 rows"):
        prepared(tmp_path, rows).read_into(numpy.empty(ROWS, RECORD), 0)


def test_a_file_cut_meanwhile(tmp_path: Path, compiled: bool) -> None:
    opened = prepared(tmp_path, records())
    os.truncate(tmp_path / "rows.npy", 2000 * RECORD.itemsize)
    with pytest.raises(DataError, match=r"rows\.npy ends early"):
        opened.read_into(numpy.empty(ROWS, RECORD), 0)


def test_a_file_that_cannot_be_read(tmp_path: Path, compiled: bool) -> None:
    opened = prepared(tmp_path, records())
    (tmp_path / "rows.npy").unlink()
    (tmp_path / "rows.npy").mkdir()
    with pytest.raises(DataError, match=r"rows\.npy cannot be read: Is a directory"):
        opened.read_into(numpy.empty(ROWS, RECORD), 0)


@pytest.mark.parametrize("rows", [1, 2, 3, 1000, 2**15 + 1, 2**17])
def test_the_order(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    order = permutation(rows, (7, 3, 11))
    monkeypatch.setattr(loading, "compiled", lambda: False)
    assert numpy.array_equal(order, permutation(rows, (7, 3, 11)))
