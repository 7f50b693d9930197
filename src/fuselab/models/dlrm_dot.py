"""The small DLRM with the dot interaction, as a separate TARGET."""

from __future__ import annotations

from dataclasses import replace

from fuselab.models.dlrm import SMALL, Dlrm, DlrmConfig, get_inputs

__all__ = ["Dlrm", "get_init_inputs", "get_inputs"]


def get_init_inputs() -> list[DlrmConfig]:
    """Return the small published configuration with the dot interaction."""
    return [replace(SMALL, interaction="dot")]
