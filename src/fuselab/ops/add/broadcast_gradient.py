"""The gradient of a broadcast operand: the upstream gradient, summed over the broadcast dimensions.

An operand without leading dimensions (a row, a bias) needs column sums. These have kernels here,
because torch's are slow where columns are few. Other sums are left to torch: it sums what is
contiguous, a row or a whole tensor, with 16 bytes per load and as fast as these kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.packs import is_aligned, pack_width
from fuselab.ops.add_mul_activation import layout, triton_launch
from fuselab.ops.add_mul_activation.configs import row_blocks
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two

CUDA_SUMS = CudaSource(Path(__file__).with_name("sums_kernels.cu"))

# Threads per block, blocks per multiprocessor, packs of 16 bytes across a block. A thread has 8
# packs in flight, 4 if a pack has 8 elements. Loads are marked as not worth keeping in the cache,
# because the gradient is read once: forward and backward of 65536 x 512 in float32 take 107.0 us
# for 112.2 without the mark (H200).
THREADS, BLOCKS, ACROSS = 512, 2, 64
# The kernels are preferred from this many elements of the upstream gradient on and up to this many
# columns. Below, a backward's time is the host's, and torch's sum needs less of it; with more
# columns torch's sum is faster (1024 x 32768 in float32 on an H200: 49.8 us for 54.8).
FEWEST_ELEMENTS = 2**22
MOST_COLUMNS = 2048

# A function that sums a contiguous gradient over the dimensions that a shape lacks, into a dtype.
LeadingSums = Callable[[Tensor, Sequence[int], torch.dtype], Tensor]


def lacks_leading(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Return whether ``shape`` is ``whole`` without leading dimensions, or with ones in their
    place, and more than a single number."""
    kept = list(shape)
    while kept and kept[0] == 1:
        del kept[0]
    return 1 < math.prod(kept) < math.prod(whole) and list(whole[len(whole) - len(kept) :]) == kept


def summed_columns(needs: Sequence[bool], grad_output: Tensor, *shapes: Sequence[int]) -> int:
    """Return the number of elements of the operand that needs a gradient and lacks leading
    dimensions, or 0 if there is none. At most one operand can lack them."""
    for need, shape in zip(needs, shapes, strict=True):
        if need and lacks_leading(shape, grad_output.shape):
            return math.prod(shape)
    return 0


def refusal(
    needs: Sequence[bool],
    grad_output: Tensor,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    *dtypes: torch.dtype,
) -> str | None:
    """Return the reason why the kernels cannot compute this backward, or None."""
    if summed_columns(needs, grad_output, input_shape, other_shape) == 0:
        return "no operand that needs a gradient lacks leading dimensions, or it is one number"
    return None if grad_output.is_contiguous() else "the upstream gradient is not contiguous"


def prefer(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[str]:
    """Return the kernels where they were measured to be faster: many rows of few columns."""
    if grad_output.numel() < FEWEST_ELEMENTS or refusal(needs, grad_output, *saved):
        return ("reference",)
    columns = summed_columns(needs, grad_output, *saved[:2])
    return ("cuda", "triton") if columns <= MOST_COLUMNS else ("reference",)


def backward(
    sums: LeadingSums, needs: Sequence[bool], grad_output: Tensor, *saved: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input and other, by ``sums`` if leading dimensions are missing."""

    def gradient(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if lacks_leading(shape, grad_output.shape):
            return sums(grad_output, shape, dtype)
        return grad_output.sum_to_size(tuple(shape)).to(dtype, copy=True)

    return tuple(
        gradient(shape, dtype) if need else None
        for need, shape, dtype in zip(needs, saved[:2], saved[2:], strict=True)
    )


def sums_triton(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sum by the bias's gradient of ``add_mul_activation`` without an activation."""
    saved = layout.saved_for("identity", dtype, None, None)
    needs = (False, False, True)
    result = triton_launch.backward(needs, grad.view(-1, math.prod(shape)), saved)[2]
    assert result is not None
    return result.view(tuple(shape))


def sums_cuda(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Sum by one launch of ``leading_sums`` and one of ``column_sums``.

    If 16-byte packs do not divide the columns, several rows are treated as one; the number of rows
    must allow that. The workspace is float64, one row per block of rows: 0.5 to 2 MB on an H200.
    The order of the sums depends on shape, device and alignment.
    """
    columns = math.prod(shape)
    rows = grad.numel() // columns
    result = grad.new_empty(tuple(shape), dtype=dtype)
    width = pack_width(grad.dtype)
    together = width // math.gcd(columns, width)  # rows taken as one
    if rows % together or not is_aligned(grad):
        width = together = 1
    rows, columns = rows // together, columns * together
    across = min(power_of_two(ceil_div(columns, width)), ACROSS)
    down = THREADS // across
    tiles = ceil_div(columns, across * width)
    most_blocks = multiprocessors(grad.device) * BLOCKS // tiles
    blocks, _ = row_blocks(rows, _rows_in_flight(width) * down, most_blocks)
    sums = grad.new_empty((blocks * together, result.numel()), dtype=torch.float64)
    CUDA_SUMS.launch(
        _leading_sums(grad.dtype, width),
        grid=(tiles, blocks, 1),
        block=(across, down, 1),
        args=(grad, sums, i64(rows), i64(columns)),
    )
    CUDA_SUMS.launch(
        f"column_sums<{CUDA_NAMES[dtype]}>",
        grid=(ceil_div(result.numel(), 8), 1, 1),
        block=(8, 128, 1),
        args=(sums, result, i64(len(sums)), i64(result.numel())),
    )
    return result


def _rows_in_flight(width: int) -> int:
    return 4 if width == 8 else 8


def _leading_sums(dtype: torch.dtype, width: int) -> str:
    return f"leading_sums<{CUDA_NAMES[dtype]}, {width}, {THREADS}, {_rows_in_flight(width)}>"


# Every dtype, with packs and without.
CUDA_EXPRESSIONS = (
    *(f"column_sums<{name}>" for name in CUDA_NAMES.values()),
    *(_leading_sums(dtype, width) for dtype in CUDA_NAMES for width in (pack_width(dtype), 1)),
)
