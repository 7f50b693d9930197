"""Data at a URL is the data of its local copy, which is fetched again when it changes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import fsspec
import numpy
import pytest
from criteo_rows import line

from fuselab.cli.main import run
from fuselab.data import open_dataset, remote
from fuselab.data.prepare import prepare
from fuselab.data.records import RECORD
from fuselab.data.source import Source
from fuselab.errors import ArgumentError, DataError, MissingDataError

LINES = [line(label, (str(count), *12 * ("3",))) for count, label in enumerate("0110100110010110")]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fsspec.AbstractFileSystem]:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    remote._copied.cache_clear()
    memory = fsspec.filesystem("memory")
    yield memory
    if memory.exists("/rows"):
        memory.rm("/rows", recursive=True)
    remote._copied.cache_clear()


def put(store: fsspec.AbstractFileSystem, place: str, lines: list[str]) -> None:
    store.makedirs(place.rpartition("/")[0], exist_ok=True)
    store.pipe_file(place, "".join(f"{one}\n" for one in lines).encode())


def counts(path: str) -> list[int]:
    return [int(rows.counts[0, 0]) for rows in Source.at(path).read(1)]


def test_a_file_a_folder_and_a_glob(store: fsspec.AbstractFileSystem) -> None:
    put(store, "/rows/day_2", LINES[:3])
    put(store, "/rows/day_10", LINES[3:8])
    put(store, "/rows/other.txt", LINES[8:])
    store.mkdir("/rows/deeper")
    assert counts("memory://rows/day_10") == [3, 4, 5, 6, 7]
    assert counts("memory://rows") == list(range(16))
    assert counts("memory://rows/day_*") == list(range(8))


def test_it_is_fetched_again_only_where_it_changed(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "/rows/one", LINES[:3])
    put(store, "/rows/two", LINES[3:5])
    put(store, "/rows/three", LINES[5:6])
    assert counts("memory://rows") == [0, 1, 2, 5, 3, 4]
    fetched: list[str] = []
    fetch = type(store).get_file
    monkeypatch.setattr(
        type(store),
        "get_file",
        lambda self, place, *rest, **more: (
            fetched.append(place),
            fetch(self, place, *rest, **more),
        ),
    )
    assert counts("memory://rows") == [0, 1, 2, 5, 3, 4]  # the process knows the copy
    remote._copied.cache_clear()
    assert counts("memory://rows") == [0, 1, 2, 5, 3, 4]
    assert fetched == []
    put(store, "/rows/two", LINES[8:11])
    store.rm("/rows/three")
    remote._copied.cache_clear()
    assert counts("memory://rows") == [0, 1, 2, 8, 9, 10]
    assert fetched == ["/rows/two"]


def test_what_was_cut_while_it_was_fetched_is_no_copy(
    store: fsspec.AbstractFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(store, "/rows/one", LINES[:3])

    def cut(self: object, place: str, target: str, *rest: object, **more: object) -> None:
        Path(target).write_text(LINES[0])
        raise ConnectionResetError("the line is dead")

    with monkeypatch.context() as broken:
        broken.setattr(type(store), "get_file", cut)
        with pytest.raises(
            DataError, match=r"'memory://rows/one' cannot be read: Connection.*dead"
        ):
            Source.at("memory://rows/one")
    assert counts("memory://rows/one") == [0, 1, 2]


def test_prepared_rows_train_from_a_url(store: fsspec.AbstractFileSystem, tmp_path: Path) -> None:
    (tmp_path / "rows.txt").write_text("".join(f"{one}\n" for one in LINES))
    made = prepare(tmp_path / "rows.txt", tmp_path / "prepared", processes=1)
    store.put(str(tmp_path / "prepared"), "/rows/prepared", recursive=True)
    (found, wanted) = (open_dataset(path) for path in ("memory://rows/prepared", made.folder))
    records = []
    for dataset in (found, wanted):
        out = numpy.empty(16, RECORD)
        dataset.open_reader().read_into(out, 0)
        records.append(out)
    assert (records[0] == records[1]).all()


def test_what_cannot_be_had_is_one_sentence(store: fsspec.AbstractFileSystem) -> None:
    with pytest.raises(MissingDataError, match="nothing is at 'memory://rows/none'"):
        Source.at("memory://rows/none")
    with pytest.raises(MissingDataError, match=r"nothing is at 'memory://rows/\*.gz'"):
        Source.at("memory://rows/*.gz")
    with pytest.raises(DataError, match="'nosuch://rows/one' cannot be read: ValueError"):
        Source.at("nosuch://rows/one")
    with pytest.raises(ArgumentError, match="is a URL; give a folder of this machine"):
        prepare("memory://rows", Path("s3://bucket/prepared"))
    put(store, "/rows/a/day", LINES[:3])
    put(store, "/rows/b/day", LINES[3:5])
    with pytest.raises(DataError, match="files of one name in several folders"):
        Source.at("memory://rows/*/day")


def test_the_command_describes_rows_at_a_url(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FUSELAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "rows.txt").write_text("".join(f"{one}\n" for one in LINES))
    result = tmp_path / "facts.json"
    assert run(["data", "describe", f"file://{tmp_path}/rows.txt", "--json", str(result)]) == 0
    assert json.loads(result.read_text())["rows"] == 16
    assert run(["data", "describe", f"file://{tmp_path}/none.txt"]) == 2
    assert "nothing is at 'file://" in capsys.readouterr().err
