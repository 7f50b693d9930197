"""Work in processes: results, the first error, a worker that is killed, a parent that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuselab.data.processes import available_cores, each
from fuselab.errors import DataError


def half(number: int) -> int:
    """The work; odd numbers are refused, 100 kills its process."""
    if number == 100:
        os.kill(os.getpid(), signal.SIGKILL)
    if number % 2:
        raise DataError(f"{number} is odd.")
    return number // 2


@pytest.mark.parametrize("tasks", [[], [2], [2, 4, 6, 8]])
def test_here_and_in_processes(tasks: list[int]) -> None:
    wanted = [(number, number // 2) for number in tasks]
    assert list(each(half, tasks, 1)) == wanted
    assert 1 <= available_cores() <= (os.cpu_count() or 1)
    if len(tasks) < 2:
        assert list(each(half, tasks, 2)) == wanted


SCRIPT = """
import sys
sys.path.insert(0, {folder!r})
from fuselab.data.processes import each
from test_processes import half, wait
if __name__ == "__main__":
    print(sorted(each(half, [2, 4, 6, 8], 2)), flush=True)
    for task in (3, 100):
        try:
            list(each(half, [2, task], 2))
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    list(each(wait, [1, 2], 2))
"""


def wait(number: int) -> None:
    """Says who it is and stays."""
    print("worker", os.getpid(), flush=True)
    time.sleep(600)


def test_errors_kills_and_what_is_left_behind(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = [parent.stdout.readline().strip() for _ in range(5)]
        assert lines[0] == "[(2, 1), (4, 2), (6, 3), (8, 4)]"
        assert lines[1] == "DataError 3 is odd."
        assert lines[2].startswith("OutputError a process was killed, as the system does when")
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


def test_an_odd_task_ends_it() -> None:
    with pytest.raises(DataError, match="3 is odd"):
        list(each(half, [2, 3, 5], 1))
