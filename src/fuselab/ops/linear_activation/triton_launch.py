"""Launching the Triton kernels: which one, and how large its tiles are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.add_mul_activation.launch import backward_triton as pull_back
from fuselab.ops.linear_activation.product import (
    SHALLOW_DEPTH,
    as_rows,
    empty_output,
    gradients,
)
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.triton_launch import launch


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of ``rows`` x ``columns`` of the output, ``depth`` of the operands at a time.

    ``group`` tiles of rows share a tile of columns in L2; ``stages`` tiles of operands are in
    shared memory at once. The shallow kernels take the whole depth and use neither."""

    rows: int
    columns: int
    depth: int = 64
    group: int = 8
    warps: int = 4
    stages: int = 3

    def shared_bytes(self, itemsize: int) -> int:
        """Of the operands under way."""
        return self.stages * self.depth * (self.rows + self.columns) * itemsize


# Largest first: smaller tiles keep all multiprocessors busy where the larger ones are too few.
# Registers in bfloat16 for sm_90 / sm_80, Triton 3.7.1: 128 x 256 183 / 255, 128 x 128 108 / 176,
# 64 x 128 117 / 180; HGMMA on sm_90 and UTCHMMA on sm_100, loads LDGSTS.128, stores STG.128. Of
# relu nothing spills but 10 words at 128 x 256 on sm_80; gelu there spills 13 on sm_90.
_HALF = (
    TileConfig(128, 256, warps=8),
    TileConfig(128, 128, warps=8),
    TileConfig(64, 128),
    TileConfig(64, 64, stages=4),
    TileConfig(32, 64, stages=4),
    TileConfig(16, 64, stages=4),
)
_TF32 = (
    TileConfig(128, 128, depth=32, warps=8),
    TileConfig(64, 128, depth=32),
    TileConfig(64, 64, depth=32),
    TileConfig(32, 64, depth=32),
    TileConfig(16, 64, depth=32),
)
# Without tensor cores: FMAs out of shared memory.
_SINGLE = (
    TileConfig(64, 64, depth=16, warps=8),
    TileConfig(32, 64, depth=16),
    TileConfig(16, 32, depth=16),
)
# Operands whose rows are not multiples of 16 bytes arrive element by element, through registers:
# a 128 x 256 tile then spills 392 words, a 64 x 128 tile in 8 warps none.
_UNALIGNED_TILE = 64 * 128
# In bfloat16 160 registers forward (3 programs per multiprocessor), 85 and 43 KB backward (5).
SHALLOW = TileConfig(64, 128)
SHALLOW_BACKWARD = TileConfig(64, 64)
SHALLOW_PROGRAMS_PER_MULTIPROCESSOR = 6
SHALLOW_BACKWARD_PROGRAMS_PER_MULTIPROCESSOR = 5


def triton_candidates(rows: int, columns: int, depth: int, dtype: torch.dtype) -> Sequence[Any]:
    """What tuning may try, for ``config=`` of ``forward``."""
    if depth <= SHALLOW_DEPTH:
        return [
            TileConfig(down, across, warps=warps)
            for down in (32, 64, 128)
            for across in (64, 128, 256)
            for warps in (4, 8)
            if down * across <= 16384
        ]
    if dtype != torch.float32:
        return [
            TileConfig(down, across, depth, group, 8 if down * across >= 16384 else 4, stages)
            for down, across in ((128, 256), (256, 128), (128, 128), (64, 256), (128, 64))
            for depth in (64, 128)
            for group in (4, 8, 16)
            for stages in (3, 4)
        ]
    return _TF32 if allows_tf32() else _SINGLE


@cache
def _device_limits(device: torch.device) -> tuple[int, int]:
    """(multiprocessors, shared bytes of a program); one of the former under the interpreter."""
    if device.type != "cuda":
        return 1, 2**30
    properties = torch.cuda.get_device_properties(device)
    optin = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return properties.multi_processor_count, optin


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(number: int, low: int, high: int) -> int:
    """The smallest power of two that is not below ``number``, within low and high."""
    return min(max(1 << max(number - 1, 0).bit_length(), low), high)


def chosen(x: Tensor, weight: Tensor) -> TileConfig:
    """The largest tile that fits shared memory and gives every multiprocessor one; no tile is wider
    than the output."""
    multiprocessors, shared_bytes = _device_limits(x.device)
    dtype, rows, columns = x.dtype, x.shape[0], weight.shape[0]
    aligned = all(
        operand.data_ptr() % 16 == 0
        and any(stride == 1 for stride in operand.stride())
        and all(stride == 1 or stride * dtype.itemsize % 16 == 0 for stride in operand.stride())
        for operand in (x, weight)
    )
    table = _HALF if dtype != torch.float32 else _TF32 if allows_tf32() else _SINGLE
    for config in table:
        across = _power_of_two(columns, 16, config.columns)
        tiles = _ceil_div(rows, config.rows) * _ceil_div(columns, across)
        fits = config.shared_bytes(dtype.itemsize) <= shared_bytes
        if not aligned and config.rows * config.columns > _UNALIGNED_TILE:
            continue
        if tiles >= multiprocessors and fits:
            break
    return replace(config, columns=across, warps=config.warps if aligned else 8)


def _precision(dtype: torch.dtype) -> str:
    """What float32 operands are multiplied in; others have one way."""
    return "tf32" if dtype != torch.float32 or allows_tf32() else "ieee"


def supports(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> str | None:
    return "it accumulates in float32" if input.dtype == torch.float64 else None


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> str | None:
    return "it accumulates in float32" if grad_output.dtype == torch.float64 else None


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: TileConfig | None = None,
) -> Tensor:
    """One launch of ``forward_shallow`` up to a depth of 32, else of ``forward``."""
    from fuselab.ops.linear_activation import triton_kernels as kernels

    output = empty_output(input, weight)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    (rows, depth), columns = x.shape, weight.shape[0]
    strides = (*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0))
    constants: dict[str, Any] = {
        "ACTIVATION": activation,
        "PRECISION": _precision(input.dtype),
    }
    if depth <= SHALLOW_DEPTH:
        config = config or SHALLOW
        constants |= {
            "ROWS": _power_of_two(rows, 16, config.rows),
            "COLUMNS": _power_of_two(columns, 16, config.columns),
            "DEPTH": _power_of_two(depth, 16, SHALLOW_DEPTH),
        }
        across = _ceil_div(columns, constants["COLUMNS"])
        programs = _device_limits(input.device)[0] * SHALLOW_PROGRAMS_PER_MULTIPROCESSOR
        workers = max(1, min(_ceil_div(rows, constants["ROWS"]), programs // across))
        launch(
            kernels.forward_shallow,
            (workers * across,),
            *(x, weight, bias, output, rows, columns, depth, workers),
            *strides,
            **constants,
            num_warps=config.warps,
        )
        return output
    config = config or chosen(x, weight)
    launch(
        kernels.forward,
        (_ceil_div(rows, config.rows) * _ceil_div(columns, config.columns),),
        *(x, weight, bias, output, rows, columns, depth),
        *strides,
        **constants,
        WHOLE_DEPTH=depth % config.depth == 0,
        ROWS=config.rows,
        COLUMNS=config.columns,
        DEPTH=config.depth,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return output


def backward(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Up to a depth of 32 the weight's gradient comes out of the same pass as the pre-activation's
    and the bias's, which is written only where the input's is needed; deeper, ``gradients``.

    The workspace is float32 (workers, columns, depth) and float64 (workers, columns): 2.5 MB on 132
    multiprocessors for 512 columns of depth 13.
    """
    depth = weight.shape[1]
    if not (needs[1] and 0 < depth <= SHALLOW_DEPTH and grad_output.numel()):
        return gradients(pull_back, needs, grad_output, output, input, weight, bias, activation)
    from fuselab.ops.add_mul_activation.triton_kernels import column_sums
    from fuselab.ops.linear_activation import triton_kernels as kernels

    x, grad = as_rows(input), as_rows(grad_output)
    rows, columns = grad.shape
    total = x.new_empty((rows, columns)) if needs[0] and activation != "identity" else None
    down = _power_of_two(rows, 16, SHALLOW_BACKWARD.rows)
    wide = _power_of_two(columns, 16, SHALLOW_BACKWARD.columns)
    across = _ceil_div(columns, wide)
    multiprocessors = _device_limits(grad.device)[0]
    programs = multiprocessors * SHALLOW_BACKWARD_PROGRAMS_PER_MULTIPROCESSOR
    workers = max(1, min(_ceil_div(rows, down), programs // across))
    rows_per_worker = _ceil_div(_ceil_div(rows, workers), down) * down
    workers = _ceil_div(rows, rows_per_worker)
    weight_sums = x.new_empty((workers, columns * depth), dtype=torch.float32)
    bias_sums = x.new_empty((workers, columns), dtype=torch.float64) if needs[2] else None
    launch(
        kernels.backward_shallow,
        (workers * across,),
        *(grad, output, x, weight, bias, total, weight_sums, bias_sums),
        *(rows, columns, depth, rows_per_worker),
        *(*grad.stride(), *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0)),
        ACTIVATION=activation,
        PRECISION=_precision(input.dtype),
        RECOMPUTE=activation_named(activation).derivative_of == "preactivation",
        ROWS=down,
        COLUMNS=wide,
        DEPTH=_power_of_two(depth, 16, SHALLOW_DEPTH),
        num_warps=SHALLOW_BACKWARD.warps,
    )
    grad_weight = x.new_empty((columns, depth))
    grad_bias = x.new_empty((columns,)) if needs[2] else None
    for sums, result in ((weight_sums, grad_weight), (bias_sums, grad_bias)):
        if sums is None or result is None:
            continue
        block_rows = _power_of_two(workers, 1, 256)
        block_columns = _power_of_two(result.numel(), 1, 4096 // block_rows)
        launch(
            column_sums,
            (_ceil_div(result.numel(), block_columns),),
            *(sums, result, workers, result.numel()),
            BLOCK_ROWS=block_rows,
            BLOCK_COLUMNS=block_columns,
        )
    grad_input = None
    if needs[0]:
        grad_input = torch.mm(grad if total is None else total, weight).view(input.shape)
    return grad_input, grad_weight, grad_bias
