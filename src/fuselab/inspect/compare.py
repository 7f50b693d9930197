"""Two profiles side by side: a verdict on the step, then shares, memory and busy share.

The verdict needs the rounds that ``wall_time`` measures without the profiler. Two TARGETs of one
call are timed in the same rounds; a run from a file was measured at another time, so its clock and
load are shown beside it and only a difference of more than 5 % counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from fuselab.measure.verdict import Verdict, unpaired, verdict

Facts = Mapping[str, Any]
TABLES = ("ranges", "operators", "modules", "lines", "kernels")


def compare(before: Facts, after: Facts, *, interleaved: bool = False) -> dict[str, Any]:
    """Return the figures of ``before`` and ``after`` in pairs; a name missing on one side has None.

    ``interleaved`` says that both were timed in the same rounds. ``verdict`` is None unless both
    sides have rounds on the same device. Rows are ordered by how many microseconds per step they
    changed. A row of ``lines`` is a line of code, also where an edit or another file has moved it:
    ``before_name`` is where it stood.
    """
    return {
        "interleaved": interleaved,
        "verdict": _verdict(before, after, interleaved),
        "wall": [before.get("wall"), after.get("wall")],
        "arguments": [before.get("arguments"), after.get("arguments")],
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
    old, new = _shares(before, table), _shares(after, table)
    names = {name: name for name in old}  # of the row that a name of before is in
    if table == "lines":
        names |= _renamed_lines(before.get(table) or (), after.get(table) or ())
    then = {names[name]: (name, share) for name, share in old.items()}
    rows = [
        {
            "name": name,
            "before_name": then[name][0] if name in then else None,
            "share": [then[name][1] if name in then else None, new.get(name)],
            "us": [
                then[name][1] * before["step_us"] if name in then else None,
                new[name] * after["step_us"] if name in new else None,
            ],
        }
        for name in dict.fromkeys([*then, *new])
    ]
    return sorted(rows, key=lambda row: -abs((row["us"][1] or 0.0) - (row["us"][0] or 0.0)))


def _shares(facts: Facts, table: str) -> dict[str, float]:
    shares: dict[str, float] = {}
    for row in facts.get(table) or ():  # kernels of one name differ by launch size
        shares[row["name"]] = shares.get(row["name"], 0.0) + row["share"]
    return shares


def _renamed_lines(old: Sequence[Facts], new: Sequence[Facts]) -> dict[str, str]:
    """Return, by the name of each line before, the name of the row it shares: that of the line with
    its text in the same file, or in the file that took its place, wherever it stands there now.

    A line that has none keeps its name; with ``(before)`` behind it if another line has it now.
    """
    by_file = [_by_file(rows) for rows in (old, new)]
    placed = [{row["name"] for held in files.values() for row in held} for files in by_file]
    renamed = {name: f"{name} (before)" for name in placed[0] & placed[1]}
    shared = [file for file in by_file[0] if file in by_file[1]]
    gone, come = ([file for file in files if file not in shared] for files in by_file)
    for left, right in [*zip(shared, shared, strict=True), *zip(gone, come, strict=False)]:
        then, now = by_file[0][left], by_file[1][right]
        matcher = SequenceMatcher(
            None, [row["text"] for row in then], [row["text"] for row in now], autojunk=False
        )
        for kind, begin, end, start, stop in matcher.get_opcodes():
            # An edited line stands where it stood, between the same neighbours.
            if kind == "equal" or (kind == "replace" and end - begin == stop - start):
                for one, other in zip(then[begin:end], now[start:stop], strict=True):
                    if other["name"] not in renamed.values():
                        renamed[one["name"]] = other["name"]
    return renamed


def _by_file(rows: Sequence[Facts]) -> dict[str, list[Facts]]:
    """Return the lines of each file in its order; the file that takes most time comes first."""
    files: dict[str, list[Facts]] = {}
    for row in sorted(rows, key=lambda row: -row["share"]):
        if row.get("file") is not None and row.get("text"):
            files.setdefault(row["file"], []).append(row)
    return {file: sorted(held, key=lambda row: row["line_number"]) for file, held in files.items()}
