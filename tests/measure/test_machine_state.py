"""How busy the machine is: what this process's threads waited, of the time they wanted."""

from __future__ import annotations

import pytest

from fuselab.measure import machine_state
from fuselab.measure.machine_state import waiting_share


@pytest.mark.parametrize(
    ("before", "after", "share"),
    [
        ((100, 50), (400, 150), 0.25),  # ran 300 ns and waited 100
        ((100, 50), (100, 50), 0.0),
        ((0, 0), (0, 0), 0.0),  # a system that keeps no accounts
        ((100, 50), (90, 40), 0.0),  # a thread has ended, and its times are gone
    ],
)
def test_the_share_of_the_time_for_which_threads_waited(
    monkeypatch: pytest.MonkeyPatch,
    before: tuple[int, int],
    after: tuple[int, int],
    share: float,
) -> None:
    accounts = iter((before, after))
    monkeypatch.setattr(machine_state, "_scheduled_ns", lambda: next(accounts))
    with waiting_share() as waited:
        assert waited() == share


def test_the_accounts_of_this_process_only_grow() -> None:
    first = machine_state._scheduled_ns()
    sum(range(100_000))
    second = machine_state._scheduled_ns()
    assert 0 <= first[0] <= second[0] and 0 <= first[1] <= second[1]
