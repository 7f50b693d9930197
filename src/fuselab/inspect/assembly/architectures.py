"""The GPU architectures that kernels are compiled for, with the limits that occupancy follows from.

The NVIDIA limits are those of ``cuda_occupancy.h``, which the pip package nvidia-cuda-runtime
carries (a test compiles that header and compares), and of the table "Technical Specifications per
Compute Capability" in NVIDIA's CUDA C++ Programming Guide. Multiprocessors are a property of the
chip: each row names the one that it stands for, by NVIDIA's data sheet.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fuselab.errors import UnknownNameError

WARP = 32
REGISTERS = 65536  # 32-bit registers of a multiprocessor, sm_75 to sm_121
REGISTERS_PER_THREAD = 255
REGISTER_UNIT = 256  # registers are given to a warp in multiples of this
WARP_UNIT = 4  # and to as many warps: a multiprocessor has four partitions
BLOCK_THREADS = 1024
STATIC_SHARED_BYTES = 48 << 10  # of one block, without opting in to more
SECTOR_BYTES = 32  # what one access of global memory moves at least
SOURCE = "cuda_occupancy.h of nvidia-cuda-runtime; CUDA C++ Programming Guide"


@dataclass(frozen=True)
class Architecture:
    """One architecture, and the chip whose number of multiprocessors stands for it."""

    name: str
    chip: str
    multiprocessors: int
    warps: int
    blocks: int
    shared_bytes: int  # of a multiprocessor
    block_shared_bytes: int  # of one block that opted in
    vendor: str = "nvidia"

    @property
    def number(self) -> int:
        """The compute capability without its dot: 90 for sm_90; 942 for gfx942."""
        return int(re.sub(r"\D", "", self.name))

    @property
    def reserved_shared_bytes(self) -> int:
        """Bytes of each block's shared memory that the system takes."""
        return 0 if self.number < 80 else 1024

    @property
    def shared_unit(self) -> int:
        """Shared memory is given to a block in multiples of this."""
        return 256 if self.number < 80 else 128


_K = 1 << 10
NVIDIA = {
    row.name: row
    for row in (
        Architecture("sm_75", "T4", 40, 32, 16, 64 * _K, 64 * _K),
        Architecture("sm_80", "A100", 108, 64, 32, 164 * _K, 163 * _K),
        Architecture("sm_86", "A10", 72, 48, 16, 100 * _K, 99 * _K),
        Architecture("sm_87", "Orin", 16, 48, 16, 164 * _K, 163 * _K),
        Architecture("sm_89", "L40S", 142, 48, 24, 100 * _K, 99 * _K),
        Architecture("sm_90", "H100 SXM", 132, 64, 32, 228 * _K, 227 * _K),
        Architecture("sm_100", "B200", 148, 64, 32, 228 * _K, 227 * _K),
        Architecture("sm_103", "B300", 148, 64, 32, 228 * _K, 227 * _K),
        Architecture("sm_120", "RTX 5090", 170, 48, 24, 100 * _K, 99 * _K),
        Architecture("sm_121", "GB10", 48, 48, 24, 100 * _K, 99 * _K),
    )
}
# AMD's limits are not used: the assembler itself writes the occupancy into its text.
AMD = {
    "gfx942": Architecture("gfx942", "MI300X", 304, 32, 32, 64 * _K, 64 * _K, vendor="amd"),
}
ARCHITECTURES = {**NVIDIA, **AMD}
DEFAULT = "sm_90"


def architecture(name: str) -> Architecture:
    """Return the architecture called ``name``: ``sm_90``, also with a suffix for its own features
    (``sm_90a``), or ``gfx942``. Raises UnknownNameError."""
    found = ARCHITECTURES.get(re.sub(r"^(sm_\d+)[af]$", r"\1", name))
    if found is None:
        raise UnknownNameError("architecture", name, ARCHITECTURES)
    return found
