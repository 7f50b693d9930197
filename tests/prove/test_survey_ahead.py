"""What is compiled before a survey: which process takes which points, and what it calls."""

from __future__ import annotations

import inspect
import json
import subprocess
from typing import Any, ClassVar

import pytest
import torch

from fuselab import ops
from fuselab.prove import survey, survey_ahead, survey_rehearsal


class Started:
    """Stands in for a process."""

    commands: ClassVar[list[list[str]]] = []

    def __init__(self, command: list[str], **settings: Any) -> None:
        self.commands.append(command)

    def wait(self) -> None: ...

    def kill(self) -> None: ...


@pytest.mark.parametrize(("points", "count", "expected"), [(10, 4, 4), (5, 8, 5), (3, 8, 0)])
def test_every_point_is_compiled_by_one_process(
    points: int, count: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Started, "commands", [])
    monkeypatch.setattr(subprocess, "Popen", Started)
    survey_ahead.compile_ahead({"named": "square"}, range(points), count)
    asked = [json.loads(command[-1]) for command in Started.commands]
    assert len(asked) == expected
    assert all(one["named"] == "square" for one in asked)
    shared = sorted(point for one in asked for point in one["points"])
    assert shared == (list(range(points)) if expected else [])
    for command in Started.commands:
        assert command[1:-1] == ["-m", survey_rehearsal.__name__]


def test_a_process_takes_what_a_survey_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []

    def ahead(what: dict[str, Any], points: object, count: int, progress: object) -> None:
        asked.append(what)

    monkeypatch.setattr(survey, "compile_ahead", ahead)
    op = ops.contract("square")
    survey.survey(op, only=(), device="cpu", named="square", ahead=2)
    (what,) = asked
    taken = inspect.signature(survey_rehearsal.rehearse).parameters
    assert set(taken) == {*what, "points"}


def test_one_process_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Started, "commands", [])
    monkeypatch.setattr(subprocess, "Popen", Started)
    survey_ahead.compile_ahead({}, range(40), 1)
    assert not Started.commands
    assert survey_ahead.processes(torch.device("cpu")) == 0


def test_a_process_calls_every_provider_of_a_survey_once() -> None:
    op, cpu = ops.contract("square"), torch.device("cpu")
    phases = ("forward", "forward+backward")
    calls = list(survey.calls_of(op, [0, 3], 7, phases, ["eager"], [torch.float32], cpu))
    assert len(calls) == 2 * len(phases) * 2  # eager and auto
    for call in calls:
        call()
