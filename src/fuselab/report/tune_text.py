"""The screen of ``fuselab tune``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fuselab.report.numbers import digits
from fuselab.report.screen import folded

_SHOWN = 12


def tune_text(facts: Mapping[str, Any]) -> str:
    """Return the screen's text from the JSON: the fastest settings, and the file's own among
    them."""
    rows = facts["rows"]
    timed = [row for row in rows if row["us"] is not None]
    refused = [row for row in rows if row["us"] is None]
    lines = [f"{facts['kernel']}, us per call, cold L2"]
    lines += [line for note in facts["notes"] for line in folded("  note: ", note)]
    shown = timed[:_SHOWN]
    if facts["first"] in timed[_SHOWN:]:
        shown.append(facts["first"])
    for row in shown:
        mark = "  (the first: what the others are compared with)" if row == facts["first"] else ""
        lines.append(f"  {digits(row['us']):>8}  {_setting(row['setting'])}{mark}")
    if len(timed) > len(shown):
        lines.append(f"  and {len(timed) - len(shown)} slower ones")
    lines += [f"  {'-':>8}  {_setting(row['setting'])}: {row['failed']}" for row in refused]
    if facts["speedup"] is not None:
        lines.append(f"the fastest takes 1/{digits(facts['speedup'])} of the first one's time")
    return "\n".join(lines)


def _setting(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in setting.items()) or "as it is"
