"""How many cycles a GPU spins per microsecond, counted where other processes interrupt."""

from __future__ import annotations

import pytest
import torch

from fuselab.measure.cuda_timer import _cycles_per_us


def test_the_shortest_count_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    between_ms = iter((0.9, 2.6, 0.5, 1.1, 3.0))
    slept: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def elapsed_time(self, end: Event) -> float:
            return next(between_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    _cycles_per_us.cache_clear()
    try:
        # A million cycles in half a millisecond; the others shared the GPU.
        assert _cycles_per_us(torch.device("cuda:0")) == 2000.0
    finally:
        _cycles_per_us.cache_clear()
    assert slept[1:] == [1_000_000] * 5
