"""Which GPUs have Hopper's instructions of ``hopper.h``, and its clusters."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether ``device`` has wgmma and the copy engine: compute capability 9.0."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def has_clusters(device: torch.device) -> bool:
    """Return whether blocks of a GPU can form clusters: compute capability 9.0 or newer."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
