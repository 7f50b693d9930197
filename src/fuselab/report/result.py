"""What every verb's JSON has in common: schema, verb, environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fuselab.device import environment

# Raised when a key changes its meaning or goes; a new key does not raise it. See docs/contract.md.
SCHEMA = 1


def result(
    verb: str, facts: Mapping[str, Any], device: torch.device | None = None
) -> dict[str, Any]:
    """``facts`` of ``verb`` under the keys common to all: what ``files.write_json`` is given."""
    common = {"schema": SCHEMA, "verb": verb, "environment": environment.describe(device)}
    return {**common, **facts}
