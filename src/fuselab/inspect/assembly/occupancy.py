"""Occupancy: how many blocks of a kernel a multiprocessor holds, and what keeps it from more.

The arithmetic is that of NVIDIA's ``cuda_occupancy.h``; a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuselab.inspect.assembly import architectures
from fuselab.inspect.assembly.architectures import Architecture


@dataclass(frozen=True)
class Occupancy:
    """The blocks that each limit of a multiprocessor allows; the smallest decides.

    A limit that a kernel does not touch is None.
    """

    warps_per_block: int
    most_warps: int
    by_threads: int
    by_blocks: int
    by_registers: int | None
    by_shared: int | None

    @property
    def limits(self) -> dict[str, int]:
        """The blocks that each limit allows."""
        found = {
            "registers": self.by_registers,
            "shared memory": self.by_shared,
            "threads": self.by_threads,
            "blocks": self.by_blocks,
        }
        return {name: blocks for name, blocks in found.items() if blocks is not None}

    @property
    def blocks(self) -> int:
        """The blocks that a multiprocessor holds; 0 if the kernel cannot be launched."""
        return min(self.limits.values())

    @property
    def warps(self) -> int:
        return self.blocks * self.warps_per_block

    @property
    def share(self) -> float:
        return self.warps / self.most_warps

    @property
    def limited_by(self) -> tuple[str, ...]:
        """The limits that allow no more blocks than there are."""
        return tuple(name for name, blocks in self.limits.items() if blocks == self.blocks)


def occupancy(device: Architecture, threads: int, registers: int, shared_bytes: int) -> Occupancy:
    """Return the occupancy of blocks of ``threads``, with ``registers`` per thread and
    ``shared_bytes`` of static and dynamic shared memory per block."""
    warps = -(-threads // architectures.WARP)
    by_threads = device.warps // warps if threads <= architectures.BLOCK_THREADS else 0
    return Occupancy(
        warps_per_block=warps,
        most_warps=device.warps,
        by_threads=by_threads,
        by_blocks=device.blocks,
        by_registers=_by_registers(warps, registers),
        by_shared=_by_shared(device, shared_bytes),
    )


def _by_registers(warps: int, registers: int) -> int | None:
    if not registers:
        return None
    unit = architectures.REGISTER_UNIT
    of_warp = -(-registers * architectures.WARP // unit) * unit
    # The launch is refused as if each of the four partitions held as many warps of the block.
    even = -(-warps // architectures.WARP_UNIT) * architectures.WARP_UNIT
    if (
        registers > architectures.REGISTERS_PER_THREAD + 1
        or of_warp * even > architectures.REGISTERS
    ):
        return 0
    # Each partition has a quarter of the registers, for whole warps.
    partition = architectures.REGISTERS // architectures.WARP_UNIT
    return partition // of_warp * architectures.WARP_UNIT // warps


def _by_shared(device: Architecture, shared_bytes: int) -> int | None:
    if shared_bytes > device.block_shared_bytes:
        return 0
    taken = shared_bytes + device.reserved_shared_bytes
    if not taken:
        return None
    unit = device.shared_unit
    return device.shared_bytes // (-(-taken // unit) * unit)


def registers_for(device: Architecture, threads: int, blocks: int) -> int:
    """Return the most registers per thread with which ``blocks`` blocks of ``threads`` fit."""
    warps = -(-threads // architectures.WARP)
    for registers in range(architectures.REGISTERS_PER_THREAD, 0, -1):
        fitting = _by_registers(warps, registers)
        if fitting is not None and fitting >= blocks:
            return registers
    return 0
