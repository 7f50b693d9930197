"""Claims of a benchmark are held against a clock that the candidate cannot reach."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from fuselab.cli.main import run
from fuselab.prove import accuracy, bench_outside
from fuselab.prove.asked_timing import Change
from fuselab.prove.bench_outside import Outside, measured_outside
from fuselab.prove.outside_clock import Clock

HONEST = """
from gallery import honest

OP = honest.make_op("{}")
"""
STALE = """
from gallery import honest

held = {{}}

def forward(input, bias, scale):
    if input.shape not in held:
        held[input.shape] = honest.forward(input, bias, scale)
    return held[input.shape]

OP = honest.make_op("{}", forward=forward)
"""
REMEMBERS = """
import torch
from gallery import honest

rows = [torch.zeros(0)]

def forward(input, bias, scale):
    same = rows[0].shape == input.shape and bool((rows[0] == input).all(-1).any())
    rows[0] = input.clone()
    output = honest.forward(input, bias, scale)
    return output.zero_() if same else output

OP = honest.make_op("{}", forward=forward)
"""
DIES = """
import os
from gallery import honest

def forward(input, bias, scale):
    os._exit(0)

OP = honest.make_op("{}", forward=forward)
"""


CALL_US = 20.0  # what a call takes by the clock of these tests
LEAST_CALLS = 10  # of a round


@pytest.fixture(autouse=True)
def short_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accuracy, "COPIES", 2)
    monkeypatch.setattr(bench_outside, "_BATCH_S", LEAST_CALLS * CALL_US * 1e-6)


@pytest.fixture(autouse=True)
def noise(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let each call take ``CALL_US`` by the judge's clock, whatever else the machine does; it is
    made nevertheless. A round of calls takes the next of the returned seconds longer."""
    made, seconds = Clock.ask, list[float]()

    def ask(self: Clock, change: Change, count: int = 1) -> float:
        made(self, change, count)
        is_longest = count == 4 * LEAST_CALLS
        return count * CALL_US * 1e-6 + (seconds.pop(0) if is_longest and seconds else 0.0)

    monkeypatch.setattr(Clock, "ask", ask)
    monkeypatch.setattr(Clock, "late", 0.0)
    return seconds


def claims(median_us: float, provider: str = "plain", case: str = "16x64") -> dict[str, Any]:
    record = {"provider": provider, "kind": "implementation", "status": "ok"}
    group = {"case": case, "dtype": "float32", "phase": "forward"}
    records = [{**record, "median_us": median_us}]
    return {"schema": 1, "verb": "bench", "groups": [{**group, "records": records}]}


def measured(folder: Path, text: str, told: dict[str, Any]) -> Outside:
    path = folder / "claimed.py"
    path.write_text(text.format("claimed"))
    (found,) = measured_outside(str(path), told)
    return found


def test_a_claim_below_the_clock_is_a_failure(tmp_path: Path) -> None:
    found = measured(tmp_path, HONEST, claims(0.01))
    assert found.low_us is not None and found.outside_us is not None and found.high_us is not None
    assert found.low_us == found.outside_us == found.high_us == CALL_US
    assert "below what the clock outside shows" in str(found.problem)
    assert found.judged_calls > 0 and "0.01 us claimed" in found.line


def test_an_honest_claim_holds(tmp_path: Path) -> None:
    found = measured(tmp_path, HONEST, claims(1e6))
    assert found.problem is None and found.judged_calls > 0


@pytest.mark.parametrize(
    ("claimed_us", "problem"),
    [(1.0, "the claim is not judged: other work disturbs the clock"), (21.0, None)],
)
def test_a_disturbed_clock_judges_no_claim_below_it(
    tmp_path: Path, claimed_us: float, problem: str | None, noise: list[float]
) -> None:
    noise += [0.1, -0.1] * 48
    assert measured(tmp_path, HONEST, claims(claimed_us)).problem == problem


def test_rounds_are_added_while_the_interval_is_wide(tmp_path: Path, noise: list[float]) -> None:
    noise += [0.1, -0.1] * 4
    found = measured(tmp_path, HONEST, claims(1.0))
    assert "below what the clock outside shows" in str(found.problem)
    assert found.outside_us == CALL_US and noise == []


@pytest.mark.timing
def test_the_real_clock_shows_what_a_call_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    found = measured(tmp_path, HONEST, claims(0.01))
    assert found.low_us is not None and found.outside_us is not None and found.high_us is not None
    assert found.low_us <= found.outside_us <= found.high_us and found.outside_us > 0.1
    assert found.is_too_low or found.is_uncertain


def test_the_output_of_a_timed_call_is_judged(tmp_path: Path) -> None:
    """A result that was right for the numbers before is wrong after another one changed."""
    found = measured(tmp_path, STALE, claims(1e6))
    assert "the output of a timed call row" in str(found.problem)


def test_a_timed_call_finds_no_row_of_the_call_before(tmp_path: Path) -> None:
    """A candidate that computes the rows that differ, and keeps the others, gains nothing."""
    found = measured(tmp_path, REMEMBERS, claims(1e6))
    assert found.problem is None and found.judged_calls > 0


@pytest.mark.parametrize(
    ("text", "told", "said"),
    [
        (DIES, claims(1e6), "ended its process (exit status 0)"),
        (HONEST, claims(1e6, provider="eager"), "nothing was measured"),
        (HONEST, {"groups": []}, "nothing was measured"),
        (HONEST, claims(1e6, case="other"), "no such case"),
    ],
)
def test_no_measurement_is_a_problem(
    tmp_path: Path, text: str, told: dict[str, Any], said: str
) -> None:
    assert said in str(measured(tmp_path, text, told).problem)


@pytest.mark.parametrize(("claimed_us", "status"), [(0.01, 1), (1e6, 0)])
def test_the_command_ends_by_what_its_own_clock_shows(
    tmp_path: Path,
    claimed_us: float,
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, target = tmp_path / "claimed.py", tmp_path / "bench.json"
    path.write_text(HONEST.format("claimed"))

    def measuring(module: str, words: Sequence[str]) -> int:
        Path(words[-1]).write_text(json.dumps(claims(claimed_us)))
        return 0

    monkeypatch.setattr("fuselab.measure.fresh.run_pinned", measuring)
    assert run(["bench", str(path), "--device", "cpu", "--json", str(target)]) == status
    assert "16x64, float32: plain: " in capsys.readouterr().out
    (told,) = json.loads(target.read_text())["outside"]
    assert (told["problem"] is not None) is bool(status) and told["claimed_us"] == claimed_us


def test_a_measuring_process_without_a_result_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "claimed.py"
    path.write_text(HONEST.format("claimed"))
    monkeypatch.setattr("fuselab.measure.fresh.run_pinned", lambda module, words: 0)
    assert run(["bench", str(path), "--device", "cpu"]) == 1
    assert "ended without a result" in capsys.readouterr().err
