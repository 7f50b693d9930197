"""Launchers of the CUDA C++ kernels of one logit per row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES, cuda_types
from fuselab.ops.linear_sigmoid.layout import Rows, backward_of, forward_of, refusal
from fuselab.runtime.cuda_source import CudaSource, f32, f64, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two

CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"))
# These sizes are block_warps and in_flight of cuda_kernels.cu.
_WARPS = 8
_IN_FLIGHT = 4
_ELEMENTS_PER_LANE = 32  # of a row: weights, their gradient and four rows take 192 registers
_BLOCKS_PER_MULTIPROCESSOR = 4


def _resident_blocks(of: Rows) -> int:
    """Return the backward's blocks per multiprocessor: resident_blocks of cuda_kernels.cu if its
    registers allow several."""
    width, chunks = _part(of)
    return 3 if width * chunks <= 8 else _BLOCKS_PER_MULTIPROCESSOR


def supports(input: Tensor, weight: Tensor, *others: Tensor | str | None) -> str | None:
    tensors = [value for value in others if isinstance(value, Tensor)]
    if input.shape[-1] > 32 * _ELEMENTS_PER_LANE:
        return f"its depth K is above {32 * _ELEMENTS_PER_LANE}"
    return refusal(input, weight, *tensors)


def _part(of: Rows) -> tuple[int, int]:
    """Return the elements of a pack and the packs per lane; packs have 16 bytes if rows and weights
    are aligned."""
    width = 16 // of.input.element_size()
    packed = (
        of.depth % width == 0
        and of.input.stride(1) == 1
        and of.weight.stride(0) == 1
        and of.input.stride(0) % width == 0
        and of.input.data_ptr() % 16 == 0
        and of.weight.data_ptr() % 16 == 0
    )
    width = width if packed else 1
    return width, power_of_two(ceil_div(of.depth, 32 * width))


def _blocks(of: Rows, per_multiprocessor: int) -> int:
    most = multiprocessors(of.input.device) * per_multiprocessor
    return min(most, ceil_div(of.rows, _WARPS * _IN_FLIGHT))


def _add_up(sums: Tensor, others: Tensor | None, last: Tensor | None) -> None:
    """Add ``sums`` (blocks, columns) over the blocks, in a fixed order: the last column into
    ``last``, the others into ``others``."""
    result = last if others is None else others
    if result is None:
        return
    blocks, columns = sums.shape
    across = min(power_of_two(columns), 8)
    CUDA.launch(
        f"add_up<{CUDA_NAMES[result.dtype]}>",
        grid=(ceil_div(columns, across), 1, 1),
        block=(across, 1024 // across, 1),
        args=(sums, others, last, i64(blocks), i64(columns)),
    )


@forward_of
def forward(of: Rows, target: Tensor | None, output: Tensor) -> None:
    """Compute the output in one launch; a reduced loss needs a second, which adds the blocks'
    sums."""
    blocks = _blocks(of, _BLOCKS_PER_MULTIPROCESSOR)
    sums = of.input.new_empty((blocks, 1), dtype=torch.float64) if of.kind == "loss" else None
    written = output if sums is None else sums
    types = (of.input.dtype, of.input.dtype if target is None else target.dtype, written.dtype)
    numbers = (of.rows, of.depth, *of.input.stride(), of.weight.stride(0))
    CUDA.launch(
        _expression("forward", of.kind, types, *_part(of)),
        (blocks, 1, 1),
        (32 * _WARPS, 1, 1),
        (
            *(of.input, of.weight, of.bias, target, written),
            *(i64(number) for number in numbers),
            i64(0 if target is None else target.stride(0)),
            f64(1 / of.divisor),
        ),
    )
    if sums is not None:
        _add_up(sums, None, output)


@backward_of
def backward(of: Rows, upstream: Tensor, kept: Tensor, grads: tuple[Tensor | None, ...]) -> None:
    """Compute the gradients as ``triton_launch.backward`` does; the workspace is float64 (blocks,
    depth + 1), 0.8 MB on 132 multiprocessors at a depth of 256."""
    grad_input, grad_weight, grad_bias = grads
    blocks = _blocks(of, _resident_blocks(of))
    sums = of.input.new_empty((blocks, of.depth + 1), dtype=torch.float64)
    weight_sums = None if grad_weight is None else sums
    bias_sums = None if grad_bias is None else sums[:, of.depth :]
    numbers = (of.rows, of.depth, upstream.stride(0), kept.stride(0))
    types = (of.input.dtype, kept.dtype, upstream.dtype)
    kind = "sigmoid" if of.kind == "sigmoid" else "loss"
    CUDA.launch(
        _expression("backward", kind, types, *_part(of)),
        (blocks, 1, 1),
        (32 * _WARPS, 1, 1),
        (
            *(upstream, kept, of.input, of.weight, of.bias, grad_input, weight_sums, bias_sums),
            *(i64(number) for number in (*numbers, *of.input.stride(), of.weight.stride(0))),
            f32(1 / of.divisor),
        ),
    )
    _add_up(sums, grad_weight, grad_bias)


def supports_backward(
    needs: Sequence[bool], grad_output: Tensor, saved: Tensor, input: Tensor, *rest: object
) -> str | None:
    return supports(input, input, saved, grad_output)


def _expression(
    step: str, kind: str, dtypes: Sequence[torch.dtype], width: int, chunks: int
) -> str:
    return f"{step}<Kind::{kind}, {cuda_types(dtypes)}, {width}, {chunks}>"


def _representative_expressions() -> tuple[str, ...]:
    """Return the expressions of every kind, dtype, pack and number of packs, and of targets of
    another dtype."""
    single = torch.float32
    found = []
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        width = 16 // dtype.itemsize
        for part in ((width, 1), (width, _ELEMENTS_PER_LANE // width), (1, 1), (1, 32)):
            alike = (dtype, dtype, dtype)
            found += [
                _expression("forward", "sigmoid", alike, *part),
                _expression("forward", "losses", alike, *part),
                _expression("forward", "loss", (dtype, single, torch.float64), *part),
                _expression("backward", "sigmoid", alike, *part),
                _expression("backward", "loss", (dtype, single, single), *part),
            ]
    return (*found, *(f"add_up<{CUDA_NAMES[dtype]}>" for dtype in CUDA_NAMES if dtype.itemsize < 8))


CUDA_EXPRESSIONS = _representative_expressions()
