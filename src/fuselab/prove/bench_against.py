"""Compare a benchmark with an earlier one from its JSON file, provider by provider.

If device and versions are equal, times are compared; otherwise shares of the ceiling are, because a
faster GPU does not make a kernel better. The two runs are not interleaved, so a difference counts
only where the 95 % intervals lie more than 5 % apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fuselab.errors import DataError
from fuselab.measure.verdict import FEWEST_ROUNDS, Outcome, unpaired
from fuselab.prove.bench_result import Bench

ENVIRONMENT = ("device_name", "driver", "cpu", "threads", "python", "torch", "triton", "cuda")


@dataclass(frozen=True)
class Change:
    """One provider on one case, then and now. ``speedup`` above 1 is faster now; ``before`` and
    ``after`` are microseconds, or shares of the ceiling."""

    case: str
    dtype: str
    phase: str
    provider: str
    before: float
    after: float
    speedup: float
    outcome: str


@dataclass(frozen=True)
class Against:
    """The comparison of a benchmark with an earlier one. ``by`` is the compared quantity (``time``
    or ``share of the ceiling``), ``differences`` lists how the environments differ, and
    ``unmatched`` lists the rows that only one of the two benchmarks has."""

    operator: str
    by: str
    differences: Sequence[str]
    changes: Sequence[Change]
    unmatched: Sequence[str]

    @property
    def slower(self) -> list[Change]:
        return [change for change in self.changes if change.outcome == Outcome.SLOWER]


def compare(now: Bench, before: Mapping[str, Any]) -> Against:
    """Compare ``now`` with the payload of an earlier benchmark of the same operator.

    Raises DataError if the payload is of another operator or lacks a field.
    """
    try:
        if before["operator"] != now.operator:
            raise DataError(
                f"the earlier benchmark is of {before['operator']}, this one of {now.operator}."
            )
        differences = [
            f"{key}: {before['environment'].get(key)} then, {now.environment.get(key)} now"
            for key in ENVIRONMENT
            if before["environment"].get(key) != now.environment.get(key)
        ]
        then = dict(_records(before["groups"]))
        here = dict(_records(now.to_json()["groups"]))
        by_share = bool(differences)
        changes = [
            change
            for key in here
            if key in then and (change := _change(key, then[key], here[key], by_share))
        ]
    except (KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the earlier benchmark's file lacks {error}; run that benchmark again."
        ) from error
    return Against(
        operator=now.operator,
        by="share of the ceiling" if by_share else "time",
        differences=differences,
        changes=changes,
        unmatched=[", ".join(key) for key in sorted(set(then) ^ set(here))],
    )


Key = tuple[str, str, str, str]


def _records(groups: Sequence[Mapping[str, Any]]) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    for group in groups:
        for record in group["records"]:
            if record["status"] == "ok":
                key = group["case"], group["dtype"], group["phase"], record["provider"]
                yield key, record


def _change(
    key: Key, before: Mapping[str, Any], after: Mapping[str, Any], by_share: bool
) -> Change | None:
    if by_share and (before["ceiling_share"] is None or after["ceiling_share"] is None):
        return None
    # Shares rise and times fall as things get better: a share is judged by its inverse, which is a
    # time in units of the ceiling's.
    value = "ceiling_share" if by_share else "median_us"

    def time_of(record: Mapping[str, Any]) -> tuple[float, float, float]:
        us = 1 / record[value] if by_share else record[value]
        scale = us / record["median_us"]
        return us, record["low_us"] * scale, record["high_us"] * scale

    found = unpaired(time_of(after), time_of(before), FEWEST_ROUNDS)
    return Change(*key, before[value], after[value], round(found.speedup, 3), str(found.outcome))
