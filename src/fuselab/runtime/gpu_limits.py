"""The limits of a GPU that launches depend on: multiprocessors, caches and shared memory."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the multiprocessors of ``device``; 1 if it is no GPU, as under the Triton interpreter,
    which runs programs in turn."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Return the bytes of shared memory that one block of ``device`` may have; 2^30, which is no
    limit, if it is no GPU."""
    if device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


@cache
def cache_bytes(device: torch.device) -> int:
    """Return the bytes of the last-level cache of ``device``; 0 if it is no GPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).L2_cache_size)
