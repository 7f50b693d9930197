"""The gradient of an operand that was broadcast: the upstream gradient, summed over what it lacks.

An operand without leading dimensions (a row, a bias) is a matter of column sums, and those have
kernels here, for torch's are slow where columns are few. Other sums are left to torch: it adds up
what is contiguous, a row or all of a tensor, 16 bytes per load and as fast as these kernels.
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

# Threads per block, blocks per multiprocessor, packs of 16 bytes across a block. A thread has 8 in
# flight, 4 where a pack holds 8 elements: 128 KB per multiprocessor, 64 of 16 bits; 4.2 TB/s at 0.8
# us need 26, but a thread asks for its next packs when it has added up the last. Loads are marked
# as not worth keeping: forward and backward of 65536 x 512 take 107.0 us for 112.2 without in
# float32, 61.8 for 66.4 in bfloat16 (H200, 2026-11-21); 256 threads 107.1 and 62.7.
THREADS, BLOCKS, ACROSS = 512, 2, 64
# Where the kernels are preferred: elements of the upstream gradient, below which a backward is the
# host's time, of which torch's sum takes less, and columns. H200, us in float32 / bfloat16, before
# loads were marked:
#                   CUDA          Triton        torch
#   65536 x   512   47.3 / 31.2   58.9 / 54.2   92.8 / 65.7
#   16384 x  2048   47.0 / 31.4   57.2 / 53.2   60.0 / 43.0
#   16384 x   256   14.7 / 12.9   18.3 / 20.3   29.0 / 27.1
#    1024 x 32768   54.8 / 39.3   60.6 / 57.8   49.8 / 34.5
FEWEST_ELEMENTS = 2**22
MOST_COLUMNS = 2048

# Sums of a contiguous gradient over the dimensions that a shape lacks, in a dtype.
LeadingSums = Callable[[Tensor, Sequence[int], torch.dtype], Tensor]


def lacks_leading(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether ``shape`` is ``whole`` without leading dimensions, or with ones in their place, and
    no single number."""
    kept = list(shape)
    while kept and kept[0] == 1:
        del kept[0]
    return 1 < math.prod(kept) < math.prod(whole) and list(whole[len(whole) - len(kept) :]) == kept


def summed_columns(needs: Sequence[bool], grad_output: Tensor, *shapes: Sequence[int]) -> int:
    """Elements of the operand that needs a gradient and lacks leading dimensions, one at most; 0
    without."""
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
    """Why the kernels are not for this backward, or None."""
    if summed_columns(needs, grad_output, input_shape, other_shape) == 0:
        return "no operand that needs a gradient lacks leading dimensions, or it is one number"
    return None if grad_output.is_contiguous() else "the upstream gradient is not contiguous"


def prefer(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[str]:
    """The kernels where they were faster: many rows of few columns."""
    if grad_output.numel() < FEWEST_ELEMENTS or refusal(needs, grad_output, *saved):
        return ("reference",)
    columns = summed_columns(needs, grad_output, *saved[:2])
    return ("cuda", "triton") if columns <= MOST_COLUMNS else ("reference",)


def unchanged(
    grad_output: Tensor,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    input_dtype: torch.dtype,
    other_dtype: torch.dtype,
) -> tuple[bool, bool]:
    """Of an operand of the sum's shape and dtype the gradient is the upstream one."""
    shape, dtype = list(grad_output.shape), grad_output.dtype
    return (
        list(input_shape) == shape and input_dtype == dtype,
        list(other_shape) == shape and other_dtype == dtype,
    )


def backward(
    sums: LeadingSums,
    needs: Sequence[bool],
    grad_output: Tensor,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    input_dtype: torch.dtype,
    other_dtype: torch.dtype,
) -> tuple[Tensor | None, ...]:
    """Gradients of input and other: ``sums`` for one that lacks leading dimensions."""

    def gradient(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        if lacks_leading(shape, grad_output.shape):
            return sums(grad_output, shape, dtype)
        return grad_output.sum_to_size(tuple(shape)).to(dtype, copy=True)

    return (
        gradient(input_shape, input_dtype) if needs[0] else None,
        gradient(other_shape, other_dtype) if needs[1] else None,
    )


def sums_triton(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The gradient of the bias of ``add_mul_activation`` without an activation."""
    saved = layout.Saved("identity", 1.0, None, None, None, None, dtype, dtype, dtype)
    needs = (False, False, True)
    result = triton_launch.backward(needs, grad.view(-1, math.prod(shape)), saved)[2]
    assert result is not None
    return result.view(tuple(shape))


def sums_cuda(grad: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """One launch of ``leading_sums`` and one of ``column_sums``.

    Of columns that 16-byte packs do not divide, several rows are taken as one; that asks for rows
    that can be. The workspace is float64, a row for each block of rows: 0.5 to 2 MB on an H200.
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


# Every dtype, packed and not.
CUDA_EXPRESSIONS = (
    *(f"column_sums<{name}>" for name in CUDA_NAMES.values()),
    *(_leading_sums(dtype, width) for dtype in CUDA_NAMES for width in (pack_width(dtype), 1)),
)
