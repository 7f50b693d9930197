"""Work in processes: results, the first error, a worker that is killed, a parent that is killed."""

from __future__ import annotations

import contextlib
import os
import signal
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
    if number == 7:
        time.sleep(0.5)
    if number % 2:
        raise DataError(f"{{number}} is odd.")
    return number // 2

def stay(number):
    os.write(1, f"worker {{os.getpid()}}\\n".encode())  # whole, beside another's
    time.sleep(600)
"""
SCRIPT = """
from work import each, half, stay

if __name__ == "__main__":
    print(sorted(each(half, [2, 4, 6, 8], 2)), flush=True)
    for tasks in ([2, 3], [7, 5], [2, 100]):
        try:
            list(each(half, tasks, 2))
        except OSError as error:
            print("OSError", error, flush=True)
        except ValueError as error:
            print("ValueError", error, flush=True)
    list(each(stay, [1, 2], 2))
"""
STARTING = """
from work import each, half

if __name__ == "__main__":
    print("begun", flush=True)
    try:
        list(each(half, [2, 4], 2))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
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
        lines = [parent.stdout.readline().strip() for _ in range(6)]
        parent.kill()
        assert lines[0] == "[(2, 1), (4, 2), (6, 3), (8, 4)]"
        assert lines[1] == "ValueError 3 is odd."
        assert lines[2] == "ValueError 7 is odd."  # the first of the tasks, not the first to fail
        assert lines[3].startswith("OSError a process was killed, as the system does when memory")
        workers = [int(line.removeprefix("worker ")) for line in lines[4:]]
    end = time.monotonic() + 120
    while any(map(_lives, workers)):
        assert time.monotonic() < end, "a worker outlives its parent"
        time.sleep(0.05)


def test_ctrl_c_while_the_processes_start_is_the_parents_alone(tmp_path: Path) -> None:
    folder = str(Path(processes.__file__).parent)
    slow = f"import os, time\nopen({str(tmp_path / 'by-')!r} + str(os.getpid()), 'w').close()\n"
    (tmp_path / "work.py").write_text(f"{slow}time.sleep(1)\n{WORK.format(folder=folder)}")
    (tmp_path / "script.py").write_text(STARTING)
    command = [sys.executable, tmp_path / "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # The server finds the work to import in the folder it is started in.
    with subprocess.Popen(command, cwd=tmp_path, start_new_session=True, **pipes) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        end = time.monotonic() + 120
        while len(list(tmp_path.glob("by-*"))) < 2 and time.monotonic() < end:
            time.sleep(0.01)  # until the server, too, imports the work, for a second
        os.killpg(parent.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            parent.wait(timeout=300)
        parent.kill()
        assert parent.communicate() == ("interrupted\n", "")


def test_ctrl_c_waits_for_no_task(tmp_path: Path) -> None:
    folder = str(Path(processes.__file__).parent)
    (tmp_path / "work.py").write_text(WORK.format(folder=folder))
    (tmp_path / "script.py").write_text(
        STARTING.replace("half, [2, 4]", "stay, [1, 2]").replace("half", "stay")
    )
    command = [sys.executable, tmp_path / "script.py"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, start_new_session=True, **pipes) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline() for _ in range(3)]
        os.killpg(parent.pid, signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            parent.wait(timeout=300)
        parent.kill()
        assert parent.communicate() == ("interrupted\n", "")
    workers = [int(line.removeprefix("worker ")) for line in lines[1:]]
    assert len(workers) == 2 and not any(map(_lives, workers))


def _lives(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"
