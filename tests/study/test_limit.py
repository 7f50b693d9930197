"""What the limit counts: parameters once, of a table only the rows looked up, products' flops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from fuselab.device.ceiling import Ceilings
from fuselab.study import limit
from fuselab.study.facts import Limit


@pytest.fixture(autouse=True)
def ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device of 1 GB/s below a MB, 10 GB/s above, 0.001 TFLOP/s, 2 us per launch."""
    known = Ceilings("d", "t", "n", "now", {"1000": 1.0, "10000000": 10.0}, {"fp32": 0.001}, 2.0)
    monkeypatch.setattr(limit, "measured_ceilings", lambda device: known)


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What was measured again; the machine is idle then, and all is ten times as fast."""
    asked: list[tuple[str, str]] = []

    def measured_again(
        known: Ceilings, device: torch.device, figure: str, key: str = ""
    ) -> Ceilings:
        asked.append((figure, key))
        if figure == "launch_us":
            return replace(known, launch_us=known.launch_us / 10)
        rates = getattr(known, figure)
        return replace(known, **{figure: {**rates, key: 10 * rates[key]}})

    monkeypatch.setattr(limit, "measured_again", measured_again)
    return asked


def limit_of(module: nn.Module, *args: Tensor, backward: bool = False) -> Limit:
    found = limit.limit_of(
        lambda: module(*args), args, list(module.parameters()), torch.device("cpu"), backward
    )
    assert found is not None
    return found


def test_a_linear_layer() -> None:
    found = limit_of(nn.Linear(30, 50), torch.randn(20, 30))
    assert found.flops == 2 * 20 * 30 * 50
    assert found.bytes == 4 * (20 * 30 + 30 * 50 + 50 + 20 * 50)
    assert (found.bound, found.us) == ("arithmetic", 60.0)
    assert (found.gbps, found.unit) == (1.0, "fp32")


def test_of_a_table_only_the_rows_looked_up_count() -> None:
    table = nn.Embedding(1_000_000, 16)
    found = limit_of(table, torch.randint(0, 1_000_000, (64,)))
    assert found.bytes == 64 * 8 + 2 * 64 * 64
    assert found.flops == 0
    assert (found.bound, found.us) == (
        "memory traffic",
        pytest.approx(found.bytes / 1000, rel=1e-3),
    )


def test_more_look_ups_than_rows_read_the_table_once() -> None:
    found = limit_of(nn.Embedding(10, 16), torch.randint(0, 10, (64,)))
    assert found.bytes == 64 * 8 + 10 * 64 + 64 * 64


def test_parameters_that_are_not_used_or_used_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(4096))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.used + self.used.view(2, 4).reshape(8)

    assert limit_of(Twice(), torch.ones(8)).bytes == 3 * 8 * 4


def test_backward_moves_the_gradients_of_parameters_too() -> None:
    forward = limit_of(nn.Linear(30, 50), torch.randn(20, 30))
    both = limit_of(nn.Linear(30, 50), torch.randn(20, 30), backward=True)
    assert both.bytes - forward.bytes == 4 * (30 * 50 + 50)


def test_a_tiny_call_is_bound_by_its_launch() -> None:
    found = limit_of(nn.ReLU(), torch.ones(4))
    assert (found.bound, found.us) == ("launch", 2.0)


def test_nothing_moved_has_no_limit() -> None:
    found = limit.limit_of(lambda: torch.ones(0), (), [], torch.device("cpu"), False)
    assert found is None


def test_a_limit_that_is_not_beaten_stands(again: list[tuple[str, str]]) -> None:
    found = limit_of(nn.Linear(30, 50), torch.randn(20, 30))
    assert limit.stands(found, found.us, torch.device("cpu")) == found
    assert again == []


def test_a_rate_that_an_earlier_part_measured_again_counts(
    again: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = limit_of(nn.ReLU(), torch.ones(1000, 1000))
    better = Ceilings("d", "t", "n", "now", {"1000": 1.0, "10000000": 40.0}, {"fp32": 1.0}, 2.0)
    monkeypatch.setattr(limit, "measured_ceilings", lambda device: better)
    assert found.us == 800.0
    assert limit.stands(found, 900.0, torch.device("cpu")).us == 200.0 and again == []


def test_rates_that_were_beaten_are_measured_again_each_once(again: list[tuple[str, str]]) -> None:
    """60 us of arithmetic, then 12.6 us of memory traffic, then 6 us of arithmetic again."""
    found = limit_of(nn.Linear(30, 50), torch.randn(20, 30))
    corrected = limit.stands(found, 1.0, torch.device("cpu"))
    assert again == [("matmul_tflops", "fp32"), ("copy_gbps", "1000")]
    assert (corrected.bound, corrected.us) == ("arithmetic", 6.0)
    assert (corrected.gbps, corrected.tflops) == (10.0, 0.01)


def test_a_launch_that_was_beaten_is_measured_again(again: list[tuple[str, str]]) -> None:
    found = limit_of(nn.ReLU(), torch.ones(4))
    assert limit.stands(found, 1.5, torch.device("cpu")).us == 0.2
    assert again == [("launch_us", "")]
