"""The small DLRM with the dot interaction, as a TARGET of its own."""

from __future__ import annotations

from dataclasses import replace

from fuselab.models.dlrm import SMALL, Dlrm, DlrmConfig, get_inputs

__all__ = ["Dlrm", "get_init_inputs", "get_inputs"]


def get_init_inputs() -> list[DlrmConfig]:
    """The small published configuration, its interaction exchanged."""
    return [replace(SMALL, interaction="dot")]
