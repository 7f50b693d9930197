"""Dask's workers write the bytes that one process writes, and its failures are sentences."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fuselab.data import synthesize
from fuselab.data.machines import each_on
from fuselab.data.prepare import prepare
from fuselab.errors import ArgumentError, DataError, OutputError

distributed = pytest.importorskip(
    "distributed", reason="Dask is not installed; pip install 'fuselab[dask]'"
)


@pytest.fixture(scope="module")
def scheduler() -> Iterator[str]:
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None,
        protocol="tcp://", host="127.0.0.1",
    ) as cluster:  # fmt: skip
        yield cluster.scheduler_address


def test_the_bytes_are_those_of_one_process(
    scheduler: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = Path("rows.tsv")  # the manifest names it as it was given
    synthesize(source, 700, seed=4)
    options = {"ids": "vocabulary", "part_bytes": 50_000}
    prepare(source, tmp_path / "one", processes=1, **options)
    prepare(source, tmp_path / "many", scheduler=scheduler, **options)
    one, many = (
        {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        for name in ("one", "many")
    )
    assert len([name for name in one if name.startswith("rows-")]) > 2
    assert many == one


def _fail(task: int) -> int:
    if task == 1:
        raise DataError("line 7 is malformed.")
    if task == 2:
        raise ZeroDivisionError("by zero")
    return task


def test_the_first_task_s_error_is_raised(scheduler: str) -> None:
    with pytest.raises(DataError, match=r"line 7 is malformed\."):
        list(each_on(scheduler, _fail, [0, 1, 2]))
    with pytest.raises(OutputError, match="task with ZeroDivisionError: by zero; every worker"):
        list(each_on(scheduler, _fail, [2]))
    assert sorted(each_on(scheduler, _fail, [5, 3])) == [(3, 3), (5, 5)]
    assert list(each_on("nowhere", _fail, [])) == []


def test_the_first_of_two_failures_is_raised_when_the_second_is_heard_of_first(
    scheduler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def last_first(futures: list[Any], **_options: Any) -> Iterator[Any]:
        for future in futures:
            future.exception()  # waits for its end
        return reversed(futures)

    monkeypatch.setattr(distributed, "as_completed", last_first)
    with pytest.raises(DataError, match=r"line 7 is malformed\."):
        list(each_on(scheduler, _fail, [0, 1, 2]))


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:9", "nowhere", "tcp://h:port"])
def test_nobody_answers(address: str) -> None:
    with pytest.raises(ArgumentError, match=f"no Dask scheduler answers at {address};"):
        list(each_on(address, _fail, [0]))
