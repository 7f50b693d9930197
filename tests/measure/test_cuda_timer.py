"""Device time by CUDA events: known durations, cold and warm, graphs, held launches."""

from __future__ import annotations

from statistics import median

import pytest
import torch

import fuselab
from fuselab.measure.cuda_timer import CudaTimer, _cycles_per_us, flush_buffer
from fuselab.measure.interleave import Candidate, interleave
from fuselab.measure.verdict import Outcome, verdict

pytestmark = [pytest.mark.gpu, pytest.mark.timing]


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def spin(device: torch.device, duration_us: float) -> None:
    torch.cuda._sleep(int(duration_us * _cycles_per_us(device)))


@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("duration_us", [20.0, 500.0])
def test_a_spinning_kernel_takes_as_long_as_it_spins(
    device: torch.device, duration_us: float, cold: bool
) -> None:
    timing = fuselab.time(spin, device, duration_us, device=device, cold=cold, budget_s=0.2)
    assert duration_us * 0.9 <= timing.median_us <= duration_us * 1.1 + 5
    assert timing.high_us - timing.low_us < 0.1 * timing.median_us


def test_device_time_leaves_the_hosts_own_time_out(device: torch.device) -> None:
    values = torch.ones(16, device=device)

    def many_launches() -> None:
        for _ in range(20):
            values.add_(1)

    timing = fuselab.time(many_launches, device=device, cold=False, budget_s=0.2)
    assert "launch gaps" not in timing.method
    # 20 launches keep the host busy for about 80 us, the device works about 2 us on each.
    assert timing.median_us < timing.host_us * 1.2


def test_a_call_that_waits_is_timed_and_said_to(device: torch.device) -> None:
    values = torch.ones(1 << 20, device=device)
    timing = fuselab.time(lambda: values.sum().item(), device=device, budget_s=0.1)
    assert "launch gaps included" in timing.method
    assert timing.median_us > 1


def test_cold_is_slower_than_warm_for_what_fits_the_l2(device: torch.device) -> None:
    size = flush_buffer(device).nbytes // 16
    values = torch.ones(size // 4, device=device)
    cold = fuselab.time(torch.sum, values, cold=True, budget_s=0.2)
    warm = fuselab.time(torch.sum, values, cold=False, budget_s=0.2)
    assert cold.median_us > warm.median_us


@pytest.mark.parametrize("cold", [True, False])
def test_a_graph_replay_times_the_same_kernel(device: torch.device, cold: bool) -> None:
    values = torch.ones(1 << 24, device=device)
    eager = fuselab.time(torch.relu, values, cold=cold, budget_s=0.2)
    replayed = fuselab.time(torch.relu, values, cold=cold, graph=True, budget_s=0.2)
    assert "CUDA graph" in replayed.method
    assert replayed.median_us == pytest.approx(eager.median_us, rel=0.1, abs=6)


def test_small_kernels_are_averaged_over_many_calls(device: torch.device) -> None:
    values = torch.ones(16, device=device)
    assert CudaTimer(lambda: torch.relu(values), device, cold=True).calls >= 8
    assert CudaTimer(lambda: torch.relu(values), device, cold=False).calls >= 8


def test_host_mode_is_the_enqueue_time(device: torch.device) -> None:
    values = torch.ones(1 << 26, device=device)
    timing = fuselab.time(torch.relu, values, mode="host")
    assert 1 < timing.median_us < 60  # the kernel itself takes above 100 us
    assert timing.method == "enqueue time"


def test_interleaved_candidates_get_repeatable_verdicts(device: torch.device) -> None:
    values = torch.randn(1 << 24, device=device)
    outcomes = []
    for seed in range(3):
        found = interleave(
            [
                Candidate("once", lambda: torch.relu(values)),
                Candidate("again", lambda: torch.relu(values)),
                Candidate("twice", lambda: torch.relu(torch.relu(values))),
            ],
            device,
            seed=seed,
            budget_s=1.0,
        )
        times = {name: samples.times_us for name, samples in found.items()}
        outcomes.append(
            (
                verdict(times["once"], times["twice"]).outcome,
                verdict(times["once"], times["again"]).outcome,
            )
        )
        assert median(times["twice"]) > 1.3 * median(times["once"])
    assert outcomes == [(Outcome.FASTER, Outcome.SAME)] * 3
