"""The screen of ``fuselab new``."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fuselab.prove.load import spec_of_folder
from fuselab.report.screen import WIDTH


def new_text(facts: Mapping[str, Any]) -> str:
    """Return the screen's text from the JSON: what was written, what to look at, what is left."""
    lines = [f"{facts['operator']}: {facts['folder']}"]
    if "parameters" in facts:
        given = ", ".join(facts["parameters"])
        count = facts["outputs"]
        returns = "one tensor" if count == 1 else f"{count} tensors"
        lines += _wrapped(f"({given}) returns {returns}, by {facts['language']}")
        if facts["backward"]:
            lines.append("  its gradient is ejected from the reference: backward/")
    for kernel in facts.get("kernels", ()):
        lines.append(f"  {kernel['name']}, ejected")
    for one in facts["guesses"]:
        lines += _wrapped(f"look at: {one}")
    for one in facts["blanks"]:
        lines += _wrapped(f"fill in: {one}")
    for name in facts["kept"]:
        lines.append(f"kept {name}, which was edited; the new one is {name}.new")
    next_step = "fill in, then " if facts["blanks"] else ""
    spec = spec_of_folder(Path(facts["folder"]))
    lines.append(f"next: {next_step}fuselab check {spec} --quick")
    return "\n".join(lines)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )
