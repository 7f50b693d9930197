"""The notes of a benchmark: when it says that the machine was busy."""

from __future__ import annotations

import contextlib
import os

import pytest
from bench_operators import operator, scaled_relu

from fuselab.device.ceiling import Ceilings
from fuselab.prove import bench as bench_module
from fuselab.prove.bench import bench

CEILINGS = Ceilings("test", "test", "none", "2026-01-01T00:00:00+00:00", {"1048576": 20.0}, {}, 1.0)


@pytest.mark.parametrize(("waited", "says"), [(0.42, "for 42.0 % of the time"), (0.05, None)])
def test_a_busy_machine_is_known_by_what_our_threads_waited(
    waited: float, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by the load, which counts every process of the last minute."""
    shares = contextlib.nullcontext(lambda: waited)
    monkeypatch.setattr(bench_module, "waiting_share", lambda: shares)
    monkeypatch.setattr(bench_module, "measured_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 99.0, 99.0))
    op = operator("busy", plain=scaled_relu)
    notes = " ".join(bench(op, providers=["eager"], device="cpu", budget_s=0.02, quick=True).notes)
    assert ("the machine is busy" in notes) is (says is not None)
    assert says is None or says in notes
