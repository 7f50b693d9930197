"""The operators registered in this process, by full name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuselab.op import FusedOp

if TYPE_CHECKING:
    from fuselab.runtime.dispatch.registration import Registration

REGISTERED: dict[str, Registration] = {}


def registered() -> dict[str, FusedOp]:
    """Return every operator registered in this process, by full name."""
    return {name: registration.op for name, registration in REGISTERED.items()}
