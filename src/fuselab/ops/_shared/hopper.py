"""Tests for GPUs that have Hopper's instructions of ``hopper.h``, and thread-block clusters."""

from __future__ import annotations

from functools import cache

import torch

from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.gpu_limits import multiprocessors


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether ``device`` has wgmma and TMA, which need compute capability 9.0 exactly."""
    return torch.cuda.get_device_capability(device) == (9, 0)


@cache
def has_clusters(device: torch.device) -> bool:
    """Return whether ``device`` has thread-block clusters: compute capability 9.0 or newer."""
    return torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def clusters_at_a_time(
    source: CudaSource,
    expression: str,
    threads: int,
    shared_bytes: int,
    cluster: int,
    device: torch.device,
) -> int:
    """Return the clusters of ``cluster`` blocks that the device can run at a time. Some
    multiprocessors stay idle if those of a group (a GPC) are not a multiple of the cluster."""
    if cluster == 1:
        return multiprocessors(device)
    index = torch.cuda.current_device() if device.index is None else device.index
    return source.active_clusters(expression, index, threads, shared_bytes, cluster)
