"""A row that a process of its own judges gets the verdict that it gets here."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fuselab.errors import TargetError
from fuselab.prove import asked_inputs
from fuselab.prove.check_group import run_group
from fuselab.prove.facts import Facts
from fuselab.prove.processes import Process
from fuselab.prove.result import Group, Verdict
from fuselab.prove.row_apart import HugeRoom, RowApart
from fuselab.prove.rows import Ends
from fuselab.prove.subject import Subject

CPU = torch.device("cpu")
OPERATOR = '''
"""{name}: doubles its input, and says so or not."""

import torch
from torch import Tensor

from fuselab.op import Case, Draw, FusedOp, Implementation, Inputs


def {name}_reference(x: Tensor) -> Tensor:
    return x * 2


def run(x: Tensor) -> Tensor:
    return x + x * {factor}


def draw(draw: Draw) -> Inputs:
    {first}
    return Inputs((draw.tensor(*draw.shape()),))


{name} = FusedOp(
    "test_row_apart::{name}",
    {name}_reference,
    {{"eager": Implementation("cpu", run)}},
    dtypes=(torch.float32, torch.float64),
    cases=(Case.normal([(8, 16)], "boundary"),),
    draw=draw,
)
'''


def row_of(file: Path, dtype: torch.dtype = torch.float32, seed: int = 11) -> RowApart:
    """Return the row of a file's operator whose implementation ``eager`` runs on the CPU."""
    with Ends(str(file)) as ends:
        facts = Facts.of_plain(ends.reference(CPU).ask(asked_inputs.operator_facts))
    return RowApart(facts, str(file), "eager", CPU, dtype, seed, True, True, 1e9, 120.0)


def written(folder: Path, name: str, factor: str = "1", first: str = "pass") -> Path:
    file = folder / f"{name}.py"
    file.write_text(OPERATOR.format(name=name, factor=factor, first=first))
    return file


def judged_here(row: RowApart) -> Group:
    with Ends(row.spec) as ends:
        reference, candidate = ends.reference(CPU), ends.candidate(CPU, "eager")
        subject = Subject(
            row.facts, reference, candidate, "eager", CPU, row.dtype, row.seed, True, spec=row.spec
        )
        return run_group(replace(subject, budget_s=row.budget_s), None)


def test_it_is_judged_as_it_is_here(tmp_path: Path) -> None:
    row = row_of(written(tmp_path, "doubled_apart"))
    room = HugeRoom(tmp_path, 1)
    with ThreadPoolExecutor(2) as pool:  # two rows at a time
        other = replace(row, dtype=torch.float64)
        found, of_other = pool.map(lambda one: one.group(room), (row, other))
    assert found == judged_here(row)
    assert found.verdict is of_other.verdict is Verdict.PASS
    assert found.trials > 100
    assert (found.dtype, of_other.dtype) == ("float32", "float64")


def test_a_wrong_one_fails_with_its_case(tmp_path: Path) -> None:
    row = row_of(written(tmp_path, "doubled_wrongly", factor="1.001"))
    found = row.group(HugeRoom(tmp_path, 1))
    assert found.verdict is Verdict.FAIL
    failure = found.failures[0]
    assert "is off by" in (failure.reason or "")
    assert f"{row.spec} --implementation eager" in (failure.repeat_command or "")


def test_an_error_of_the_declaration_is_raised(tmp_path: Path) -> None:
    row = row_of(written(tmp_path, "doubled_never", first="raise KeyError('no size')"))
    with pytest.raises(TargetError, match="drawing its inputs raised KeyError: 'no size'"):
        row.group(HugeRoom(tmp_path, 1))


def test_a_judge_that_is_ended_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = row_of(written(tmp_path, "doubled_alone"))
    start = Process.start

    def ended_soon(process: Process) -> None:
        start(process)
        if process.role == "judge":
            os.kill(process._pid, signal.SIGKILL)

    monkeypatch.setattr(Process, "start", ended_soon)
    found = row.group(HugeRoom(tmp_path, 1))
    assert found.verdict is Verdict.FAIL
    assert found.failures[0].reason == (
        "the process that judges it: it ended its process by SIGKILL"
    )


def test_room_is_never_given_twice(tmp_path: Path) -> None:
    room = HugeRoom(tmp_path, 5)
    used, most, lock = 0, 0, threading.Lock()

    def take(parts: int) -> None:
        nonlocal used, most
        with room.taken(parts):
            with lock:
                used += min(parts, 5)
                most = max(most, used)
            time.sleep(0.01)
            with lock:
                used -= min(parts, 5)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(take, [2, 2, 2, 8, 1, 1, 4, 3] * 3))
    assert used == 0
    assert 4 <= most <= 5
