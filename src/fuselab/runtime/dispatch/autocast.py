"""Autocast: whether it is on, and calling a function without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from fuselab.op import tensors_in


def has_autocast(device: str) -> bool:
    """Return whether autocast is on for this type of device; meta has none, and asking raises."""
    return device != "meta" and torch.is_autocast_enabled(device)


def without_autocast(function: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    """Return ``function(*arguments)``, called with autocast off on the arguments' device."""
    device = tensors_in(arguments)[0].device.type
    if has_autocast(device):
        with torch.autocast(device, enabled=False):
            return function(*arguments)
    return function(*arguments)
