"""How a backward with the gradient of the bias is spread over a GPU, and what tuning may choose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

# elements and warps of a program's tile, programs per multiprocessor, interleaved or not. The first
# was measured: 152 us at 65536 x 512 float32, where the limit is 128 (H200).
TRITON = (
    Config(elements=2048, warps=4, programs=4, interleaved=0),
    Config(elements=2048, warps=4, programs=4, interleaved=1),
    Config(elements=1024, warps=4, programs=8, interleaved=1),
    Config(elements=4096, warps=8, programs=4, interleaved=1),
    Config(elements=4096, warps=16, programs=4, interleaved=1),
    Config(elements=2048, warps=8, programs=8, interleaved=1),
)
# Threads per block, blocks per multiprocessor, packs that a thread has in flight per operand (half
# of them where a pack holds 8 elements), interleaved or not. The first was measured: 146 us, and
# more blocks were slower (154 us with 4), but column_sums had few threads to add them up then. To
# find out is whether the flat kernel, which reaches 98 % of the limit, owes that to its order of
# accesses: interleaved it is the same, and with one pack in flight relu takes 31 registers, so that
# 2048 threads of a multiprocessor run, 64 KB in flight. None of them spills in float32.
CUDA = (
    Config(threads=256, blocks=2, in_flight=4, interleaved=0),
    Config(threads=256, blocks=2, in_flight=4, interleaved=1),
    Config(threads=1024, blocks=2, in_flight=1, interleaved=1),
    Config(threads=512, blocks=4, in_flight=1, interleaved=1),
    Config(threads=256, blocks=8, in_flight=1, interleaved=1),
    Config(threads=256, blocks=16, in_flight=1, interleaved=1),
    Config(threads=256, blocks=4, in_flight=2, interleaved=1),
    Config(threads=512, blocks=2, in_flight=2, interleaved=1),
    Config(threads=512, blocks=2, in_flight=4, interleaved=1),
    Config(threads=1024, blocks=2, in_flight=1, interleaved=0),
    # Not measured. A cluster of blocks owns all rows of 128 bytes of columns, so that there is no
    # second launch: 3.8 us (ncu, 65536 x 512) and the gap before it, of 146 in all.
    Config(threads=512, in_flight=2, cluster=16),
    Config(threads=512, in_flight=4, cluster=16),
    Config(threads=1024, in_flight=2, cluster=16),
    Config(threads=1024, in_flight=4, cluster=16),
    Config(threads=512, in_flight=4, cluster=8),
)
# In CUDA C++, up to SHORT_ROWS one block adds up all rows of 128 bytes of columns. There is no
# second launch then, which takes 3 us of the device and keeps the host from holding a plan (160 us
# against 69).
SHORT_ROWS = 1024
SHORT = Config(threads=1024, blocks=1, in_flight=2, interleaved=0)


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
    """``blocks`` of rows: block b takes a tile every ``step`` rows from row b * ``apart`` on, as
    far as ``span`` rows reach."""

    blocks: int
    apart: int
    step: int
    span: int

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.apart, self.step, self.span


def spread(rows: int, tile_rows: int, most_blocks: int, interleaved: bool) -> Spread:
    """As many blocks as may be, with equally many tiles but for the last. Interleaved, all blocks
    together sweep the rows from first to last, as the blocks of a flat kernel do; else each owns
    consecutive rows."""
    tiles = ceil_div(rows, tile_rows)
    tiles_per_block = ceil_div(tiles, max(1, min(tiles, most_blocks)))
    blocks = ceil_div(tiles, tiles_per_block)
    if interleaved:
        return Spread(blocks, tile_rows, blocks * tile_rows, rows)
    return Spread(blocks, tiles_per_block * tile_rows, tile_rows, tiles_per_block * tile_rows)
