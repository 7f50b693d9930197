"""A capture that breaks leaves allocations, random numbers and later captures as they were."""

from __future__ import annotations

import pytest
import torch

import fuselab
from fuselab.measure.cuda_graph import captured

pytestmark = pytest.mark.gpu


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def assert_captures_and_draws(device: torch.device) -> None:
    assert torch.randn(1000, device=device).std().item() > 0.5
    value = torch.ones(8, device=device)
    graph, result = captured(lambda: value * 2, device)
    value.fill_(4)
    graph.replay()
    assert result.tolist() == [8.0] * 8


@pytest.mark.parametrize("ends_on_another_stream", [False, True])
def test_a_broken_capture_spoils_nothing_after_it(
    device: torch.device, ends_on_another_stream: bool
) -> None:
    value = torch.ones(8, device=device)

    def breaks() -> torch.Tensor:
        if ends_on_another_stream:
            torch.cuda.set_stream(torch.cuda.Stream(device))
        torch.cuda.synchronize(device)  # not allowed while capturing
        return value + 1

    before = torch.cuda.current_stream(device)
    with pytest.raises(RuntimeError):
        captured(breaks, device)
    torch.cuda.set_stream(before)
    assert_captures_and_draws(device)


@pytest.mark.parametrize("cold", [True, False])
def test_a_call_that_cannot_be_captured_spoils_no_later_timing(
    device: torch.device, cold: bool
) -> None:
    value = torch.ones(8, device=device)
    with pytest.raises(RuntimeError):
        fuselab.time(lambda: value.sum().item(), device=device, cold=cold, graph=True)
    assert_captures_and_draws(device)
