"""How a backward with the gradient of the bias is spread over a GPU, and what tuning may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

# Elements and warps of a program's tile, programs per multiprocessor, interleaved or not. The first
# takes 152 us at 65536 x 512 float32 (H200). The second is not timed; CUDA C++ gained 2.5 % so.
TRITON = (
    Config(elements=2048, warps=4, programs=4, interleaved=0),
    Config(elements=2048, warps=4, programs=4, interleaved=1),
)
# Threads per block, blocks per multiprocessor, packs that a thread has in flight per operand (half
# of them where a pack holds 8 elements). All blocks sweep the rows together, as a flat kernel's do.
# The first takes 143.2 us at 65536 x 512 in float32, where the limit is 130, and 78.6 of 68.5 in
# bfloat16; blocks of consecutive rows 148 and 83 at best, clusters of blocks that need no second
# launch 162 and 85 (H200, 2026-11-21). The second is for GPUs whose multiprocessors run fewer
# threads: 144.6 and 79.8.
# Not timed: blocks come in ``waves``, so that a multiprocessor that is ahead takes more of them, as
# in a flat kernel (131 us), where else the slowest of 256 fixed shares decides; column_sums starts
# ``early``, under the end of the first launch (it takes 3.7 us by itself, and a gap before it). The
# sums of a wave are 0.2 % of the traffic in float32, 0.8 % in bfloat16. All above have 64 KB in
# flight per multiprocessor in float32 and wait 4 us for them, where 14 hold 2.1 TB/s of reads at
# 0.9 us: 32 and 48 may be enough, and keep the order of accesses closer.
CUDA = (
    Config(threads=512, blocks=2, in_flight=2, waves=1, early=0),
    Config(threads=512, blocks=2, in_flight=2, waves=1, early=1),
    Config(threads=512, blocks=2, in_flight=2, waves=2, early=1),
    Config(threads=512, blocks=2, in_flight=2, waves=4, early=1),
    Config(threads=512, blocks=2, in_flight=2, waves=8, early=1),
    Config(threads=512, blocks=4, in_flight=1, waves=4, early=1),
    Config(threads=512, blocks=2, in_flight=1, waves=1, early=1),
    Config(threads=512, blocks=3, in_flight=1, waves=1, early=1),
    Config(threads=256, blocks=4, in_flight=2, waves=1, early=0),
    Config(threads=256, blocks=4, in_flight=2, waves=4, early=1),
)
# In CUDA C++, up to SHORT_ROWS one block adds up all rows of 128 bytes of columns. There is no
# second launch then, which takes 3 us of the device and keeps the host from holding a plan (160 us
# against 69).
SHORT_ROWS = 1024
SHORT = Config(threads=1024, blocks=1, in_flight=2, waves=1, early=0)


def configs(candidates: Sequence[Config], needs: Sequence[bool]) -> Sequence[Config]:
    """For ``FusedOp.configs``: without the gradient of the bias there is nothing to choose."""
    return candidates if needs[-1] else candidates[:1]


def tuned(implementation: str, grad_output: Tensor, candidates: Sequence[Config]) -> Config:
    """What tuning chose for add_mul_activation: all others that run its kernels take that too."""
    key = (grad_output.dtype, power_of_two(grad_output.numel()))
    return chosen("fuselab::add_mul_activation", implementation, key, candidates)


def rows_in_flight(config: Any, width: int) -> int:
    """Packs of ``width`` elements that a CUDA thread has in flight per operand."""
    return max(1, config.in_flight // 2) if width > 4 else int(config.in_flight)


@dataclass(frozen=True)
class Spread:
    """``blocks`` of rows: every ``together`` of them own a band of ``span`` rows, and of that each
    takes a tile every ``step`` rows."""

    blocks: int
    together: int
    step: int
    span: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.together, self.step, self.span


def spread(
    rows: int, tile_rows: int, most_blocks: int, interleaved: bool, waves: int = 1
) -> Spread:
    """As many blocks as may be, ``most_blocks`` in each of ``waves``, with equally many tiles but
    for the last. Interleaved, the blocks of a wave together sweep the rows of its band from first
    to last, as the blocks of a flat kernel do; else each owns consecutive rows."""
    tiles = ceil_div(rows, tile_rows)
    most_blocks = max(1, min(tiles, most_blocks))
    tiles_per_block = ceil_div(tiles, most_blocks * waves)
    together = ceil_div(tiles, tiles_per_block * waves) if interleaved else 1
    whole_bands, left = divmod(tiles, together * tiles_per_block)
    blocks = whole_bands * together + min(together, left)
    return Spread(blocks, together, together * tile_rows, together * tiles_per_block * tile_rows)
