"""The implementation that a module of launchers stands for."""

from __future__ import annotations

from types import ModuleType
from typing import Any, Literal

from fuselab.op import Implementation

_STEPS = ("forward", "backward", "supports", "supports_backward")


def launched(device: Literal["cuda", "cpu"], launcher: ModuleType, **others: Any) -> Implementation:
    """Return the implementation made of ``launcher``'s forward, backward, supports and
    supports_backward, those that it has; ``others`` replace them."""
    steps = {step: getattr(launcher, step) for step in _STEPS if hasattr(launcher, step)}
    return Implementation(device, **(steps | others))
