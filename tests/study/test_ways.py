"""The four ways: what is timed, what is not and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fuselab.inspect.targets import Target
from fuselab.measure import cpu_timer
from fuselab.study.facts import Limit, Way
from fuselab.study.ways import against, time_ways

LIMIT = Limit(5.0, "memory traffic", 1, 1, 1.0, 1.0, "fp32")


CLOCK_NS = [0]  # goes on by what a call is said to take


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_timer, "perf_counter_ns", lambda: CLOCK_NS[0])


def slow(x: torch.Tensor) -> torch.Tensor:
    CLOCK_NS[0] += 400_000
    return x + 200


def fast(x: torch.Tensor) -> torch.Tensor:
    CLOCK_NS[0] += 25_000
    return x + 200


def ways(
    monkeypatch: pytest.MonkeyPatch, fused: Callable[..., Any] | None, compiled: Any
) -> dict[str, Way]:
    """Timed with ``compiled`` in place of torch.compile."""
    monkeypatch.setattr(torch, "compile", compiled)
    target = Target("t", "t", "t.py", slow, (torch.zeros(8),), {}, torch.device("cpu"))
    found = time_ways(target, fused, backward=False, budget_s=60.0, progress=lambda text: None)
    assert all(way.limit_share is None for way in found)
    found = against(found, LIMIT)
    assert [way.title for way in found] == [
        "eager",
        "fuselab.fuse",
        "torch.compile",
        "torch.compile of fused",
    ]
    return {way.name: way for way in found}


def test_all_four(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ways(monkeypatch, fast, lambda function: function)
    eager, fused, compiled = found["eager"], found["fused"], found["compiled"]
    assert None not in (eager.us, fused.us, compiled.us)
    assert (eager.speedup, eager.outcome) == (1.0, None)
    assert fused.outcome == "FASTER"
    assert (eager.us, fused.us, fused.speedup) == (400.0, 25.0, 16.0)
    assert fused.low_us <= fused.us <= fused.high_us
    assert fused.limit_share == pytest.approx(5.0 / fused.us, rel=1e-3)
    assert fused.limit_share == float(f"{fused.limit_share:.4g}")
    assert fused.prepare_s > 0
    assert found["compiled_fused"].outcome == "FASTER"


def test_nothing_replaced_is_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ways(monkeypatch, None, lambda function: function)
    assert found["fused"].us is found["compiled_fused"].us is None
    assert (found["fused"].same_as, found["compiled_fused"].same_as) == ("eager", "compiled")
    assert found["fused"].reason == "nothing was replaced, so this is eager"
    assert found["compiled"].us > 0


def test_a_compile_that_raises_gives_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(*args: Any) -> None:
            raise RuntimeError("no\nsuch\x1b[31m kernel.")

        return refuse

    found = ways(monkeypatch, fast, compiled)
    assert found["compiled"].us is None
    assert found["compiled"].reason == "RuntimeError: no such [31m kernel"
    assert found["fused"].outcome == "FASTER"
