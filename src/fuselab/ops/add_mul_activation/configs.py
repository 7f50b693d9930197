"""The GPU configurations of a backward with the bias's gradient, and what tuning may choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

# CUDA C++: threads per block, blocks per multiprocessor, and the packs that a thread has in flight
# per operand (half as many if a pack has 8 elements). All blocks sweep the rows together, as a flat
# kernel's do. The second configuration is for GPUs whose multiprocessors run fewer threads.
#
# At 65536 x 512 the first takes 140.7 us in float32 and 75.0 in bfloat16 on an H200. The flat
# kernel without the bias's gradient takes 130.0 and 67.5, which is the limit. About a third of the
# difference is the second launch; the rest is in the first, which waits for memory. To avoid both,
# tiles would be handed out as blocks become free, but then the order of the sums would change from
# run to run, and the counter would have no safe place under CUDA graphs.
CUDA = (
    Config(threads=512, blocks=2, in_flight=2),
    Config(threads=256, blocks=4, in_flight=2),
)
# Triton: elements and warps of a program's tile, programs per multiprocessor. A program owns
# consecutive rows.
TRITON_ELEMENTS, TRITON_WARPS, TRITON_PROGRAMS = 2048, 4, 4
# In CUDA C++, up to SHORT_ROWS rows one block sums all rows of 128 bytes of columns. That saves the
# second launch, which takes 3 us of the device's time.
SHORT_ROWS = 1024
SHORT = Config(threads=1024, blocks=1, in_flight=2)


def configs(needs: Sequence[bool], *saved: Any) -> Sequence[Config]:
    """Return the candidates for ``FusedOp.configs``; without the bias's gradient there is only
    one."""
    return CUDA if needs[-1] else CUDA[:1]


def tuned(grad_output: Tensor) -> Config:
    """Return what tuning chose for add_mul_activation. Every operator on its kernels uses it."""
    key = (grad_output.dtype, power_of_two(grad_output.numel()))
    return chosen("fuselab::add_mul_activation", "cuda_backward", key, CUDA)


def rows_in_flight(config: Any, width: int) -> int:
    """Return the packs of ``width`` elements that a CUDA thread has in flight per operand."""
    return max(1, config.in_flight // 2) if width > 4 else int(config.in_flight)


def row_blocks(rows: int, tile_rows: int, most_blocks: int) -> tuple[int, int]:
    """Split tiles of rows evenly into at most ``most_blocks`` blocks; return the number of blocks
    and the tiles of each, of which the last may have fewer."""
    tiles = ceil_div(rows, tile_rows)
    tiles_per_block = ceil_div(tiles, max(1, most_blocks))
    return ceil_div(tiles, tiles_per_block), tiles_per_block
