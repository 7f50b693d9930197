"""The screen of ``fuselab eject``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuselab.prove.load import spec_of_folder
from fuselab.report.screen import folded


def eject_text(facts: Mapping[str, Any]) -> str:
    """Return the screen's text from the JSON: the kernels, and what to do next."""
    lines = [f"{facts['operator']}: {facts['folder']}"]
    for kernel in facts["kernels"]:
        loops = f"rows {', '.join(kernel['rows']) or 'one'}"
        if kernel["columns"]:
            loops += f"; columns {', '.join(kernel['columns'])}"
        lines += [
            f"  {kernel['name']} ({loops})",
            *folded(
                "    ", f"reads {', '.join(kernel['reads'])}; writes {', '.join(kernel['writes'])}"
            ),
        ]
    if facts["where"]:
        where = " and ".join(facts["where"])
        lines += folded("  ", f"only where {where}; else the reference computes")
    stays = facts.get("pytorch_calls")
    if stays:
        names = ", ".join(dict.fromkeys(call["name"] for call in stays))
        lines += folded("  ", f"PyTorch calls between them: {names} (page.md says why)")
    whole = facts.get("whole")
    if whole:
        lines += [
            f"  {whole['name']} (one kernel of the whole; rows {', '.join(whole['rows'])})",
            f"    products {', '.join(whole['products'])}; page.md there compares the forms",
        ]
    for name in facts["kept"]:
        lines.append(f"kept {name}, which was edited; the new one is {name}.new")
    spec = spec_of_folder(Path(facts["folder"]))
    lines.append(f"next: fuselab check {spec} --quick")
    return "\n".join(lines)
