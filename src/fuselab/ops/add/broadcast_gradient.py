"""The gradient of an operand that was broadcast: the upstream gradient, summed over what it lacks.

An operand without leading dimensions (a bias, a row, a number) is a matter of column sums, and
those have kernels here. At 65536 x 512 float32 their floor is one read of 134 MB, 33 us on an H200,
where torch's sum takes 90. Sums over other dimensions are left to torch: it adds up a row that is
contiguous 16 bytes per load.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations.grid import CUDA_NAMES, is_aligned, pack_width
from fuselab.ops.add_mul_activation import launch as pointwise
from fuselab.ops.add_mul_activation.bias_gradient import row_blocks, rows_in_flight
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.tuning import Config, chosen

CUDA_SUMS = CudaSource(Path(__file__).with_name("cuda_sums.cu"))

# Threads per block, blocks per multiprocessor, 16-byte packs that a thread has in flight (half of
# them where a pack holds 8 elements): 128 KB per multiprocessor, 64 of 16 bits. 4.2 TB/s at 0.8 us
# need 26, but a thread asks for its next packs when it has added up the last.
CUDA = (
    Config(threads=512, blocks=2, in_flight=8),
    Config(threads=512, blocks=2, in_flight=4),
)
# Up to SHORT_ROWS a block adds up all rows of its columns, 128 bytes of them or more where rows are
# few, and nothing is left for a second launch.
SHORT_ROWS = 1024
SHORT = Config(threads=1024, blocks=1, in_flight=4)
# Of the upstream gradient. Below, a backward is the host's time, of which torch's sum takes less.
FEWEST_ELEMENTS = 2**22

# Sums of a contiguous gradient over the dimensions that a shape lacks, in a dtype.
LeadingSums = Callable[[Tensor, Sequence[int], torch.dtype], Tensor]


def lacks_leading(shape: Sequence[int], whole: Sequence[int]) -> bool:
    """Whether ``shape`` is ``whole`` without leading dimensions, or with ones in their place."""
    kept = list(shape)
    while kept and kept[0] == 1:
        del kept[0]
    return math.prod(kept) < math.prod(whole) and list(whole[len(whole) - len(kept) :]) == kept


def refusal(
    needs: Sequence[bool],
    grad_output: Tensor,
    input_shape: Sequence[int],
    other_shape: Sequence[int],
    *dtypes: torch.dtype,
) -> str | None:
    """Why the kernels are not for this backward, or None."""
    wanted = [shape for need, shape in zip(needs, (input_shape, other_shape), strict=True) if need]
    if not any(lacks_leading(shape, grad_output.shape) for shape in wanted):
        return "no operand that needs a gradient lacks leading dimensions"
    if grad_output.numel() == 0:
        return "the upstream gradient has no element"
    return None if grad_output.is_contiguous() else "the upstream gradient is not contiguous"


def prefer(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[str]:
    """The kernels where leading dimensions are summed, from 2^22 elements on."""
    is_long = grad_output.numel() >= FEWEST_ELEMENTS
    is_ours = is_long and refusal(needs, grad_output, *saved) is None
    return ("cuda", "triton") if is_ours else ("reference",)


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
    saved = pointwise.Saved("identity", 1.0, None, None, None, None, dtype, dtype, dtype)
    needs = (False, False, True)
    result = pointwise.backward_triton(needs, grad.view(-1, math.prod(shape)), saved)[2]
    assert result is not None
    return result.view(tuple(shape))


def sums_cuda(
    grad: Tensor, shape: Sequence[int], dtype: torch.dtype, config: Config | None = None
) -> Tensor:
    """One launch of ``leading_sums``, and of ``column_sums`` where there is more than one block of
    rows.

    Of columns that 16-byte packs do not divide, several rows are taken as one; that asks for rows
    that can be. The workspace is float64, the blocks per multiprocessor of ``config`` times the
    columns at most 256. The order of the sums depends on shape, device, ``config`` and alignment.
    """
    columns = math.prod(shape)
    rows = grad.numel() // columns
    result = grad.new_empty(tuple(shape), dtype=dtype)
    how = config or SHORT
    if rows > SHORT_ROWS and config is None:
        key = (grad.dtype, power_of_two(grad.numel()))
        how = chosen("fuselab::add", "cuda_backward", key, CUDA)
    width = pack_width(grad.dtype)
    together = width // math.gcd(columns, width)  # rows taken as one
    if rows % together or not is_aligned(grad) or (how is SHORT and together > 1):
        width = together = 1
    rows, columns = rows // together, columns * together
    unroll = rows_in_flight(how, width)
    most_across = 64 if width > 1 else 128
    if how is SHORT:
        most_across = how.threads // min(power_of_two(ceil_div(rows, unroll)), 128)
    across = min(power_of_two(ceil_div(columns, width)), most_across)
    down = how.threads // across
    tiles = ceil_div(columns, across * width)
    programs = 1 if how is SHORT else multiprocessors(grad.device) * how.blocks
    blocks, _ = row_blocks(rows, unroll * down, programs // tiles)
    parts = blocks * together
    sums = result
    if parts > 1:
        sums = grad.new_empty((parts, columns // together), dtype=torch.float64)
    CUDA_SUMS.launch(
        f"leading_sums<{CUDA_NAMES[grad.dtype]}, {CUDA_NAMES[sums.dtype]}, {width}, "
        f"{how.threads}, {unroll}>",
        grid=(tiles, blocks, 1),
        block=(across, down, 1),
        args=(grad, sums, i64(rows), i64(columns)),
    )
    if parts > 1:
        CUDA_SUMS.launch(
            f"column_sums<{CUDA_NAMES[dtype]}>",
            grid=(ceil_div(result.numel(), 8), 1, 1),
            block=(8, 128, 1),
            args=(sums, result, i64(parts), i64(result.numel())),
        )
    return result


def configs(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> Sequence[Config]:
    """For ``FusedOp.configs``: there is nothing to choose where the kernels do not run."""
    return CUDA[:1] if refusal(needs, grad_output, *saved) else CUDA


def _expressions() -> tuple[str, ...]:
    """Every dtype; packed and not, as parts and as the result, every configuration."""
    found = []
    for dtype, name in CUDA_NAMES.items():
        width = pack_width(dtype)
        for how in (*CUDA, SHORT):
            sum_name = name if how is SHORT else "double"
            found += [
                f"leading_sums<{name}, {sum_name}, {pack}, {how.threads}, "
                f"{rows_in_flight(how, pack)}>"
                for pack in (width, 1)
            ]
        found.append(f"column_sums<{name}>")
    return tuple(found)


CUDA_EXPRESSIONS = _expressions()
