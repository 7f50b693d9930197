"""What a GPU has of each: the two limits that launches are sized by."""

from __future__ import annotations

from functools import cache

import torch


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of ``device``; 1 off a GPU: the Triton interpreter's programs run in turn."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def shared_bytes(device: torch.device) -> int:
    """Bytes of shared memory that one block of ``device`` may have; 2^30, no limit, off a GPU."""
    if device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
