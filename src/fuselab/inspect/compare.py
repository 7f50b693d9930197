"""Two profiles side by side: a verdict on the step, then shares, memory and busy share.

The verdict needs the rounds that ``wall_time`` measures without the profiler. Two TARGETs of one
call are timed in the same rounds; a run from a file was measured at another time, so its clock and
load are shown beside it and only a difference of more than 5 % counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselab.measure.verdict import Verdict, unpaired, verdict

Facts = Mapping[str, Any]
TABLES = ("ranges", "operators", "modules", "lines", "kernels")


def compare(before: Facts, after: Facts, *, interleaved: bool = False) -> dict[str, Any]:
    """Return the figures of ``before`` and ``after`` in pairs; a name missing on one side has None.

    ``interleaved`` says that both were timed in the same rounds. ``verdict`` is None unless both
    sides have rounds on the same device. Rows are ordered by how many microseconds per step they
    changed.
    """
    return {
        "interleaved": interleaved,
        "verdict": _verdict(before, after, interleaved),
        "wall": [before.get("wall"), after.get("wall")],
        "device_name": [_device_name(before), _device_name(after)],
        "step_us": [before["step_us"], after["step_us"]],
        "split": {key: [before["split"][key], after["split"][key]] for key in after["split"]},
        "peak_bytes": [_peak(before), _peak(after)],
        "busy_share": [before["busy_share"], after["busy_share"]],
        "device": [before["device"], after["device"]],
        **{name: _rows(before, after, name) for name in TABLES},
    }


def _verdict(before: Facts, after: Facts, interleaved: bool) -> dict[str, Any] | None:
    then, now = before.get("wall"), after.get("wall")
    if then is None or now is None or _device_name(before) != _device_name(after):
        return None
    rounds = min(len(then["rounds_us"]), len(now["rounds_us"]))
    found: Verdict
    if interleaved:
        found = verdict(now["rounds_us"][:rounds], then["rounds_us"][:rounds])
    else:
        keys = ("us", "low_us", "high_us")
        before_us, low, high = (then[key] for key in keys)
        after_us, after_low, after_high = (now[key] for key in keys)
        found = unpaired((after_us, after_low, after_high), (before_us, low, high), rounds)
    return {
        "outcome": str(found.outcome),
        "speedup": found.speedup,
        "low": found.low,
        "high": found.high,
        "rounds": rounds,
    }


def _device_name(facts: Facts) -> str | None:
    environment = facts.get("environment")
    name = environment.get("device_name") if environment else facts.get("device_name")
    return str(name) if name is not None else None


def _peak(facts: Facts) -> int | None:
    return facts["memory"]["peak_bytes"] if facts["memory"] else None


def _rows(before: Facts, after: Facts, table: str) -> list[dict[str, Any]]:
    sides = []
    for facts in (before, after):
        shares: dict[str, float] = {}
        for row in facts.get(table) or ():  # kernels of one name differ by launch size
            shares[row["name"]] = shares.get(row["name"], 0.0) + row["share"]
        sides.append(shares)
    old, new = sides
    rows = [
        {
            "name": name,
            "share": [old.get(name), new.get(name)],
            "us": [
                old[name] * before["step_us"] if name in old else None,
                new[name] * after["step_us"] if name in new else None,
            ],
        }
        for name in dict.fromkeys([*old, *new])
    ]
    return sorted(rows, key=lambda row: -abs((row["us"][1] or 0.0) - (row["us"][0] or 0.0)))
