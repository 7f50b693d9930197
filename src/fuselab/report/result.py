"""The keys that every verb's JSON has in common: schema, verb, environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuselab.device import environment

# Raised when a key changes its meaning or is removed, not for a new key. See docs/contract.md.
SCHEMA = 1


def result(
    verb: str, facts: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """Add the keys common to all verbs to ``facts``; ``files.write_json`` takes the result."""
    common = {"schema": SCHEMA, "verb": verb, "environment": environment.describe(device)}
    return {**common, **facts}
