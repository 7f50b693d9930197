"""Tests for GPUs that have Hopper's instructions of ``hopper.h``, and thread-block clusters."""

from __future__ import annotations

from functools import cache

import torch


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether ``device`` has wgmma and TMA, which need compute capability 9.0 exactly."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def has_clusters(device: torch.device) -> bool:
    """Return whether ``device`` has thread-block clusters: compute capability 9.0 or newer."""
    return torch.cuda.get_device_capability(device) >= (9, 0)
