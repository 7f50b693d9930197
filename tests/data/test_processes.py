"""Work in processes: results, the first error, a worker that is killed, a parent that is killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuselab.data import processes
from fuselab.data.processes import available_cores, each
from fuselab.errors import DataError

# ``processes`` is imported on its own there, as a package it would bring torch (2 s a process).
WORK = """
import os, signal, sys, time
sys.path.append({folder!r})
from fuselab.errors import DataError
from processes import each

def half(number):
    if number == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 2:
        raise DataError(f"{{number}} is odd.")
    return number // 2

def stay(number):
    print("worker", os.getpid(), flush=True)
    time.sleep(600)
"""
SCRIPT = """
from work import each, half, stay

if __name__ == "__main__":
    print(sorted(each(half, [2, 4, 6, 8], 2)), flush=True)
    for task in (3, 100):
        try:
            list(each(half, [2, task], 2))
        except OSError as error:
            print("OSError", error, flush=True)
        except ValueError as error:
            print("ValueError", error, flush=True)
    list(each(stay, [1, 2], 2))
"""


@pytest.mark.parametrize("tasks", [[], [2], [2, 4, 6, 8]])
def test_in_this_process(tasks: list[int]) -> None:
    for many in (1, 2):
        if min(many, len(tasks)) < 2:
            assert list(each(str, tasks, many)) == [(task, str(task)) for task in tasks]
    assert 1 <= available_cores() <= (os.cpu_count() or 1)


def test_an_error_ends_it() -> None:
    begun = []

    def work(task: int) -> None:
        begun.append(task)
        if task == 3:
            raise DataError("3 is odd.")

    with pytest.raises(DataError, match="3 is odd"):
        list(each(work, [2, 3, 5], 1))
    assert begun == [2, 3]


def test_errors_kills_and_what_is_left_behind(tmp_path: Path) -> None:
    folder = str(Path(processes.__file__).parent)
    (tmp_path / "work.py").write_text(WORK.format(folder=folder))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, tmp_path / "script.py"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().strip() for _ in range(5)]
        assert lines[0] == "[(2, 1), (4, 2), (6, 3), (8, 4)]"
        assert lines[1] == "ValueError 3 is odd."
        assert lines[2].startswith("OSError a process was killed, as the system does when memory")
        workers = [int(line.removeprefix("worker ")) for line in lines[3:]]
        parent.kill()
    end = time.monotonic() + 20
    while any(map(_lives, workers)):
        assert time.monotonic() < end, "a worker outlives its parent"
        time.sleep(0.05)


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
