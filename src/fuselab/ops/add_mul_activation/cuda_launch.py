"""Launchers of the CUDA C++ kernels of act(input + scale * update + bias).

Every launcher takes the kernels' source as its first argument, so that each package passes its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import ACTIVATIONS
from fuselab.ops._shared.dtypes import CUDA_NAMES, cuda_types
from fuselab.ops._shared.grid import THREADS
from fuselab.ops._shared.layout import Nest
from fuselab.ops._shared.packs import is_aligned, pack_width
from fuselab.ops._shared.template_arguments import cuda_float, flags, index_type, numbers
from fuselab.ops.add_mul_activation import configs
from fuselab.ops.add_mul_activation.layout import (
    Gradients,
    Matrices,
    Operands,
    Saved,
    backward_dtypes,
    backward_kind,
    flat_columns,
    forward_dtypes,
    kind_of,
    run_backward,
    run_forward,
)
from fuselab.runtime.cuda_source import CudaSource
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.parameters import Scalar, i64
from fuselab.runtime.tuning import Config


def _launch(
    source: CudaSource,
    kernel: str,
    loops: Nest,
    flat: tuple[int, int] | None,
    width: int,
    aligned: tuple[bool, bool, Tensor | None, bool],
    operands: Sequence[Tensor | Scalar | None],
) -> None:
    """Launch ``kernel``, which ends in an open template argument list, or its strided form.

    ``aligned`` has the fields of Access in cuda_kernels.cu; in place of the bias's field it has the
    bias itself.
    """
    numel = loops.numel
    is_wide = loops.needs_64_bit_offsets()  # in a flat kernel only a long bias stride can need it
    if flat is None:
        padded = loops.padded()
        is_wide |= numel + 4 * THREADS > 2**31 - 1
        kernel = kernel.replace("<", "_strided<", 1)
        kernel += f", {index_type(is_wide)}, {len(loops.sizes)}>"
        blocks, shape = ceil_div(numel, 4 * THREADS), (*padded.sizes, *sum(padded.strides, ()))
    else:
        first, second, bias, written = aligned
        bias_packed = bias is not None and flat[1] == 1 and flat[0] % width == 0
        access = flags(first, second, bias_packed and is_aligned(bias), written)
        index = index_type(is_wide or numel + THREADS * width > 2**31 - 1)
        kernel += f", {index}, Access<{access}>, {width}>"
        blocks, shape = ceil_div(numel, THREADS * width), flat
    arguments = (*operands, i64(numel), *numbers(shape))
    source.launch(kernel, grid=(blocks, 1, 1), block=(THREADS, 1, 1), args=arguments)


def forward(source: CudaSource, *args: Any, output: Tensor | None = None) -> Tensor:
    """Launch ``forward`` if all tensors are dense with the same strides, else
    ``forward_strided``."""

    def launch(
        loops: Nest, operands: Operands, scale: float | Tensor, activation: str, output: Tensor
    ) -> None:
        input, update, bias = operands
        scale_type, scale_argument = cuda_float(scale, output.dtype)
        dtypes = forward_dtypes(output, operands)
        _launch(
            source,
            f"forward<{kind_of(activation, update, bias)}, {cuda_types(dtypes)}, {scale_type}",
            loops,
            flat_columns(loops, None if bias is None else 2, (0, 1)),
            pack_width(*dtypes[:3]),
            (is_aligned(input), is_aligned(update), bias, is_aligned(output)),
            (*operands, output, scale_argument),
        )

    return run_forward(launch, output, *args)


def backward(
    source: CudaSource,
    needs: Sequence[bool],
    grad_output: Tensor,
    saved: Saved,
    config: Config | None = None,
) -> Gradients:
    """Compute the gradients by one launch of ``backward`` or ``backward_strided``. If the bias's is
    needed, launch ``backward_with_bias``, and ``column_sums`` if there are several row blocks.

    The workspace and the copies are those of ``triton_launch.backward``, with ``blocks`` per
    multiprocessor as ``config`` says. ``config`` is one of configs.CUDA, by default what tuning
    chose; the order of the sums depends on it too.
    """
    dtypes = backward_dtypes(grad_output, saved)
    types = f"{backward_kind(saved)}, {cuda_types(dtypes)}"
    scale_type, scale = cuda_float(saved.scale, grad_output.dtype)
    width = pack_width(*dtypes[:4])

    def elementwise(loops: Nest, operands: Operands, grads: Gradients) -> None:
        _launch(
            source,
            f"backward<{types}, {scale_type}",
            loops,
            flat_columns(loops, None if saved.bias is None else 3, (0, 1, 2)),
            width,
            (is_aligned(*operands[:2]), is_aligned(operands[2]), saved.bias, is_aligned(*grads)),
            (*operands, *grads[:2], scale),
        )

    def with_bias(matrices: Matrices) -> None:
        how = config
        if how is None and matrices.rows > configs.SHORT_ROWS:
            how = configs.tuned(grad_output)
        _launch_with_bias(source, types, scale_type, scale, width, matrices, saved.bias, how)

    return run_backward(needs, grad_output, saved, elementwise, with_bias)


def _launch_with_bias(
    source: CudaSource,
    types: str,
    scale_type: str,
    scale: Tensor | Scalar,
    width: int,
    matrices: Matrices,
    bias: Tensor | None,
    config: Config | None,
) -> None:
    """Launch ``backward_with_bias``; ``config`` is None if one block takes all rows."""
    rows, columns = matrices.rows, matrices.columns
    read = [operand for operand in matrices.operands if operand is not None]
    if columns % width or not all(operand.is_contiguous() for operand in read):
        width = 1
    if not is_aligned(*read, *matrices.written[:2]):
        width = 1
    how = config or configs.SHORT
    unroll = configs.rows_in_flight(how, width)
    if config:
        most_across = 64 if width > 1 else 128
    else:  # few rows: all rows of threads have one, if the columns are as many
        most_across = how.threads // min(power_of_two(ceil_div(rows, unroll)), how.threads // 8)
        most_across = max(most_across, 8 if width > 1 else 32)
    across = min(power_of_two(ceil_div(columns, width)), most_across)
    down = how.threads // across
    column_tiles = ceil_div(columns, across * width)
    programs = multiprocessors(matrices.grad_bias.device) * how.blocks if config else 1
    blocks, _ = configs.row_blocks(rows, unroll * down, programs // column_tiles)
    sums = matrices.empty_sums(blocks)
    index = index_type(matrices.needs_64_bit_offsets())
    source.launch(
        f"backward_with_bias<{types}, {CUDA_NAMES[sums.dtype]}, {scale_type}, {index}, "
        f"{width}, {how.threads}, {unroll}>",
        grid=(column_tiles, blocks, 1),
        block=(across, down, 1),
        args=(
            *(*matrices.operands, bias, *matrices.written[:2], sums, scale),
            *numbers((rows, columns), matrices.strides),
        ),
    )
    if blocks > 1:
        source.launch(
            f"column_sums<{CUDA_NAMES[matrices.grad_bias.dtype]}>",
            grid=(ceil_div(columns, 8), 1, 1),
            block=(8, 128, 1),
            args=(sums, matrices.grad_bias, i64(blocks), i64(columns)),
        )


def cuda_expressions(has_update: bool) -> tuple[str, ...]:
    """Return instantiations that together reach every line of cuda_kernels.cu: each kernel,
    activation and dtype, both offset widths, aligned and not, the scale by value and by pointer."""
    terms = f"Terms<{flags(has_update, True)}>"
    aligned = f"Access<{flags(True, True, True, True)}>"
    unaligned = f"Access<{flags(False, False, False, False)}>"

    def spread(width: int, config: Config = configs.CUDA[0]) -> str:
        return f"{width}, {config.threads}, {configs.rows_in_flight(config, width)}"

    short = configs.SHORT
    found = []
    for entry in ACTIVATIONS.values():
        kind, single = f"{entry.functor}, {terms}", ", ".join(["float"] * 4)
        found += [
            f"forward<{kind}, {single}, float, int32_t, {aligned}, 4>",
            f"backward<{kind}, float, {single}, float, int32_t, {aligned}, 4>",
        ]
    for dtype, name in CUDA_NAMES.items():
        width = pack_width(dtype)
        kind = f"{'Gelu' if dtype == torch.float64 else 'Relu'}, {terms}"
        scale = "double" if dtype == torch.float64 else "float"
        four, five = ", ".join([name] * 4), ", ".join([name] * 5)
        found += [
            f"forward<{kind}, {four}, {scale}, int64_t, {aligned}, {width}>",
            f"forward<{kind}, {four}, const {scale}*, int32_t, {unaligned}, {width}>",
            f"forward_strided<{kind}, {four}, {scale}, int32_t, 5>",
            f"backward_strided<{kind}, {five}, {scale}, int64_t, 3>",
            f"backward_with_bias<{kind}, {five}, double, {scale}, int32_t, {spread(width)}>",
            f"backward_with_bias<{kind}, {five}, {name}, {scale}, int64_t, {spread(1)}>",
            f"backward_with_bias<{kind}, {five}, {name}, {scale}, int32_t, {spread(width, short)}>",
            f"column_sums<{name}>",
        ]
    return tuple(found)
