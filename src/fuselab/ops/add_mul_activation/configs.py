"""How a backward with the gradient of the bias is spread over a GPU, and what tuning may choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

# CUDA C++: threads per block, blocks per multiprocessor, packs that a thread has in flight per
# operand (half of them where a pack holds 8 elements). All blocks sweep the rows together, as a
# flat kernel's do. The second is for GPUs whose multiprocessors run fewer threads.
#
# At 65536 x 512 the first takes 140.7 us in float32 and 75.0 in bfloat16; the flat kernel that
# leaves the bias out takes 130.0 and 67.5, which is the limit (H200, 2026-11-22; in the bench on
# another machine 143.6 and 77.5). Of the 11 and 7 us between:
#   4 and 3   the second launch with the gap before it; column_sums alone is 3.7 and 4.2 in ncu
#   7 and 4   the first: it waits for memory (long_scoreboard 59 of 63), which it keeps 81 and 79 %
#             busy where flat kernels that write as much keep it 88 % busy. Blocks that stay lose
#             as much where they only write: 67 MB take them 18.7 us, one pack per thread 17.4.
# What did not help, as a share of the time: blocks of consecutive rows 1.03 and 1.06; blocks in 2,
# 4 or 8 waves 1.00 to 1.10; a twentieth to a third of the rows left to small blocks that follow
# 0.98 to 1.04 and 1.02 to 1.14; whole rows, or one block of 1024 threads, 1.00 to 1.04; a half or
# three quarters of the bytes in flight 1.00 to 1.02; clusters that need no second launch 1.13 and
# 1.08; that launch started under the first's end 0.99.
# What 97 % would take: no second launch, and tiles handed out as blocks become free. Such tiles
# take 134.4 and 71.4 us without the second launch, 97 and 95 % of the flat kernel, but their sums
# have an order that changes from run to run; and a counter has no safe place, for a graph that
# holds its address may run beside a call on the stream that it belongs to.
CUDA = (
    Config(threads=512, blocks=2, in_flight=2),
    Config(threads=256, blocks=4, in_flight=2),
)
# Triton: elements and warps of a program's tile, programs per multiprocessor; a program owns
# consecutive rows. 152 us at 65536 x 512 in float32.
TRITON_ELEMENTS, TRITON_WARPS, TRITON_PROGRAMS = 2048, 4, 4
# In CUDA C++, up to SHORT_ROWS one block adds up all rows of 128 bytes of columns. There is no
# second launch then, which takes 3 us of the device.
SHORT_ROWS = 1024
SHORT = Config(threads=1024, blocks=1, in_flight=2)


def configs(needs: Sequence[bool], *saved: Any) -> Sequence[Config]:
    """For ``FusedOp.configs``: without the gradient of the bias there is nothing to choose."""
    return CUDA if needs[-1] else CUDA[:1]


def tuned(grad_output: Tensor) -> Config:
    """Return what tuning chose for add_mul_activation: all that run its kernels take that too."""
    key = (grad_output.dtype, power_of_two(grad_output.numel()))
    return chosen("fuselab::add_mul_activation", "cuda_backward", key, CUDA)


def rows_in_flight(config: Any, width: int) -> int:
    """Packs of ``width`` elements that a CUDA thread has in flight per operand."""
    return max(1, config.in_flight // 2) if width > 4 else int(config.in_flight)


def row_blocks(rows: int, tile_rows: int, most_blocks: int) -> tuple[int, int]:
    """Return the number of blocks of rows, at most ``most_blocks``, and the tiles of each: equally
    many but for the last."""
    tiles = ceil_div(rows, tile_rows)
    tiles_per_block = ceil_div(tiles, max(1, most_blocks))
    return ceil_div(tiles, tiles_per_block), tiles_per_block
