"""The outcome of each finding: replaced, fused by torch.compile, tried and not kept, or open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselab.report.numbers import ratio
from fuselab.study.facts import Kernel, Lead, Replaced

# The findings that a compiler's fused kernel removes; an expanded operand it still writes to
# memory.
_CURED_BY_FUSING = ("chain", "repeated small operator", "launch-bound")
_TAKEN = ("title", "advice", "line", "source", "saved_us", "share")
_MOST = 12  # the most findings in a study; `fuselab profile` shows all


def leads_of(
    findings: Sequence[Mapping[str, Any]], replaced: Sequence[Replaced], kernels: Sequence[Kernel]
) -> tuple[Lead, ...]:
    """Return the profile's findings, in their order, each with what was done about it."""
    found = []
    for finding in findings[:_MOST]:
        state, done = _outcome(finding, replaced, kernels)
        found.append(Lead(**{key: finding[key] for key in _TAKEN}, state=state, done=done))
    return tuple(found)


def _outcome(
    finding: Mapping[str, Any], replaced: Sequence[Replaced], kernels: Sequence[Kernel]
) -> tuple[str, str]:
    line = finding["line"]
    tried = [row for row in replaced if line is not None and short_line(row.line) == line]
    kept = next((row for row in tried if row.decision == "kept"), None)
    if kept is not None:
        return "replaced", f"Replaced by {kept.operator}: {ratio(kept.speedup)} as fast there."
    fusing = [row for row in kernels if line in row.lines.split(", ") and row.kind == "generated"]
    if fusing and finding["kind"] in _CURED_BY_FUSING:
        names = ", ".join(row.name for row in fusing[:2])
        more = f" and {len(fusing) - 2} more" if len(fusing) > 2 else ""
        also = f" {_tried(tried[0])}" if tried else ""
        return "compiled", f"torch.compile fuses this line: it becomes part of {names}{more}.{also}"
    if tried:
        return "tried", _tried(tried[0])
    return (
        "open",
        "Left as it is: no operator computes this, nor does a fused kernel.",
    )


def _tried(row: Replaced) -> str:
    return f"{row.operator} was tried here and not kept: {row.reason}."


def short_line(source: str) -> str:
    """Return the file name and line of a source place: ``/path/model.py:12`` as ``model.py:12``."""
    return Path(source).name
