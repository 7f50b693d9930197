"""The keys that every verb's JSON has in common: schema, verb, environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from fuselab.device import environment
from fuselab.report import files

# Raised when a key changes its meaning or is removed, not for a new key. See docs/contract.md.
SCHEMA = 1


def result(
    verb: str, facts: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """Add the keys common to all verbs to ``facts``; ``files.write_json`` takes the result."""
    common = {"schema": SCHEMA, "verb": verb, "environment": environment.describe(device)}
    return {**common, **facts}


def write_result(
    path: str | os.PathLike[str] | None,
    verb: str,
    facts: Mapping[str, Any],
    device: torch.device | None = None,
) -> None:
    """Write ``facts`` with the common keys as JSON; with None, the call has no ``--json``. Raises
    OutputError."""
    if path is not None:
        files.write_json(path, result(verb, facts, device))
