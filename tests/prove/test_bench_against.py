"""Two benchmarks against each other: by time on one device, by share of the ceiling on two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from fuselab.errors import DataError
from fuselab.prove.bench_against import compare
from fuselab.prove.bench_result import Bench, Group, Record

ENVIRONMENT = {"device_name": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0"}


def result(
    median_us: float, spread: float = 0.01, share: float | None = 0.9, **environment: Any
) -> Bench:
    record = Record(
        "triton",
        "implementation",
        "ok",
        median_us=median_us,
        low_us=median_us * (1 - spread),
        high_us=median_us * (1 + spread),
        ceiling_share=share,
    )
    group = Group("4096x4096", "float32", "forward", 1, 1, 1, "fp32", None, [record])
    return Bench("a::b", {**ENVIRONMENT, **environment}, {}, {}, [group], [], [])


@pytest.mark.parametrize(
    ("before", "after", "spread", "outcome"),
    [
        (100, 100, 0.01, "SAME"),
        (100, 102, 0.01, "SAME"),
        (100, 110, 0.01, "SLOWER"),
        (110, 100, 0.01, "FASTER"),
        (100, 106, 0.01, "UNCLEAR"),  # the intervals lie less than 5 % apart
        (100, 120, 0.10, "UNCLEAR"),
    ],
)
def test_times_on_the_same_device(before: float, after: float, spread: float, outcome: str) -> None:
    found = compare(result(after, spread), result(before, spread).to_json())
    assert found.by == "time" and found.differences == []
    (change,) = found.changes
    assert (change.outcome, change.before, change.after) == (outcome, before, after)
    assert change.speedup == round(before / after, 3)
    assert [change] * (outcome == "SLOWER") == found.slower


def test_another_device_is_said_and_compared_by_share_of_the_ceiling() -> None:
    before = result(100, share=0.95, device_name="NVIDIA A100", torch="2.10.0").to_json()
    found = compare(result(40, share=0.80), before)
    assert found.by == "share of the ceiling"
    assert found.differences == [
        "device_name: NVIDIA A100 then, NVIDIA H200 now",
        "torch: 2.10.0 then, 2.11.0 now",
    ]
    (change,) = found.changes
    assert (change.before, change.after, change.outcome) == (0.95, 0.80, "SLOWER")
    assert change.speedup == round(0.80 / 0.95, 3)


def test_without_a_share_on_another_device_nothing_is_said() -> None:
    before = result(100, share=None, torch="2.10.0").to_json()
    assert compare(result(400), before).changes == []


def test_what_only_one_of_the_two_has_is_listed() -> None:
    now = result(100)
    before = result(100).to_json()
    before["groups"][0]["case"] = "4x4"
    found = compare(now, before)
    assert found.changes == []
    assert found.unmatched == [
        "4096x4096, float32, forward, triton",
        "4x4, float32, forward, triton",
    ]


def test_a_provider_that_was_wrong_then_is_not_compared() -> None:
    before = result(100).to_json()
    before["groups"][0]["records"][0].update(status="wrong", median_us=None)
    assert compare(result(100), before).changes == []


def test_another_operator_or_a_damaged_file_is_refused() -> None:
    with pytest.raises(DataError, match="is of a::c, this one of a::b"):
        compare(result(100), replace(result(100), operator="a::c").to_json())
    with pytest.raises(DataError, match="lacks 'groups'"):
        before = result(100).to_json()
        del before["groups"]
        compare(result(100), before)
