"""The outcome of each finding: replaced, fused by torch.compile, tried and not kept, or open."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fuselab.report.numbers import ratio
from fuselab.study.facts import Kernel, Lead, Replaced

# The findings that a compiler's fused kernel removes; an expanded operand it still writes to
# memory.
_CURED_BY_FUSING = ("chain", "repeated small operator", "launch-bound")
_TAKEN = ("kind", "title", "advice", "line", "source", "saved_us", "share")
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
    generated = [row for row in kernels if row.kind == "generated"]
    if finding["kind"] == "torch.compile" and generated:
        return "compiled", (
            f"torch.compile writes {len(generated)} kernel{'s' if len(generated) != 1 else ''} for "
            "the target; how fast it is as a whole stands above. Each chain has a finding of its "
            "own."
        )
    tried = _tried_for(finding, replaced)
    kept = next((row for row in tried if row.decision == "kept"), None)
    if kept is not None:
        return "replaced", f"Replaced by {kept.operator}: {ratio(kept.speedup)} as fast there."
    fusing = [row for row in generated if line in row.lines.split(", ")]
    if fusing and finding["kind"] in _CURED_BY_FUSING:
        names = ", ".join(row.name for row in fusing[:2])
        more = f" and {len(fusing) - 2} more" if len(fusing) > 2 else ""
        also = f" {_tried(tried[0])}" if tried else ""
        return "compiled", f"torch.compile fuses this line: it becomes part of {names}{more}.{also}"
    if tried:
        return "tried", _tried(tried[0])
    return (
        "open",
        "Left as it is: nothing that was tried computes it.",
    )


def _tried_for(finding: Mapping[str, Any], replaced: Sequence[Replaced]) -> list[Replaced]:
    """Return the replacements that were tried for what a finding is about.

    Those on one of its lines come first, and of these the ones that share most operators with it. A
    chain has one line in the table but may span several: one whose operations include at least half
    of the finding's operators counts where both lie in one function.
    """
    if finding["line"] is None:
        return []
    lines = {finding["line"], *(finding.get("lines") or ())}
    named = {name.removeprefix("aten::").strip("_") for name in finding.get("operators") or ()}

    def shared(row: Replaced) -> int:
        return len(named.intersection(re.findall(r"\w+", row.chain)))

    exact = [row for row in replaced if lines.intersection((*row.lines, short_line(row.line)))]
    around = [
        row
        for row in replaced
        if row not in exact
        and 0 < len(named) <= 2 * shared(row)
        and _in_one_function(finding, short_line(row.line))
    ]
    return [*sorted(exact, key=shared, reverse=True), *around]


def _in_one_function(finding: Mapping[str, Any], place: str) -> bool:
    file, number = finding.get("file"), finding.get("line_number")
    name, _, other = place.rpartition(":")
    if not file or number is None or Path(file).name != name or not other.isdecimal():
        return False
    mine = _function_around(file, number)
    return mine is not None and mine == _function_around(file, int(other))


def _function_around(file: str, line: int) -> tuple[int, int] | None:
    """Return the first and last line of the innermost function around a line."""
    around = [(first, last) for first, last in _functions(file) if first <= line <= last]
    return min(around, key=lambda span: span[1] - span[0], default=None)


@functools.cache
def _functions(file: str) -> tuple[tuple[int, int], ...]:
    try:
        tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return ()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return tuple(
        (node.lineno, node.end_lineno or node.lineno)
        for node in ast.walk(tree)
        if isinstance(node, kinds)
    )


def _tried(row: Replaced) -> str:
    return f"{row.operator} was tried here and not kept: {row.reason}."


def short_line(source: str) -> str:
    """Return the file name and line of a source place: ``/path/model.py:12`` as ``model.py:12``."""
    return Path(source).name
