"""Launching the kernels: S, the product on top of its update, and the sums of the backward.

Two implementations share all but the large product. ``fused_product`` is one Triton kernel with one
accumulator. ``library_product`` leaves x Wᵀ to cuBLAS and adds the update in one pass over the
output: together with the activation, which eager's pass over the output would be there for, or as
what cuBLAS accumulates onto.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation.product import as_rows, empty_output
from fuselab.runtime.matmul_precision import allows_tf32
from fuselab.runtime.triton_launch import launch

# (input, weight, bias, projection, up, scale, activation), all matrices, to the output.
Product = Callable[..., Tensor]
Gradients = tuple[Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class TileConfig:
    """A tile of ``rows`` x ``columns`` of the output, ``inner`` of the operands at a time.

    ``group`` tiles of rows share a tile of columns in L2; ``stages`` tiles of operands are in
    shared memory at once. ``maps``: fetched by tensor maps (TMA), where the operands allow it.
    """

    rows: int
    columns: int
    inner: int
    group: int = 8
    warps: int = 4
    stages: int = 3
    maps: bool = False


# A 128 x 256 tile is 128 accumulator registers in 8 warps, and 48 KB of bfloat16 a stage.
# H200, 8192 x 4096 -> 4096: 1024 tiles in 7.8 rounds of 132.
_HALF = (
    TileConfig(128, 256, 64, warps=8),
    TileConfig(128, 128, 64, warps=8),
    TileConfig(64, 128, 64),
    TileConfig(64, 64, 64, stages=4),
    TileConfig(16, 64, 64, stages=4),
)
_TF32 = (
    TileConfig(128, 128, 32, warps=8),
    TileConfig(64, 128, 32),
    TileConfig(64, 64, 32),
    TileConfig(16, 64, 32),
)
# Without tensor cores: FMAs out of shared memory.
_SINGLE = (TileConfig(64, 64, 16, warps=8), TileConfig(32, 64, 16), TileConfig(16, 32, 16))
# Encoding tensor maps costs some 10 us of host time per launch.
_MAPS_FROM_FLOPS = 2**36
# A stream of the output: four 16-byte stores per thread in bfloat16.
_UPDATE = TileConfig(64, 128, 16, warps=8)
_PROJECT_INNER_BYTES = 256  # of a row of input at a time: full lines
# Up to here S's gradient comes out of the pass that pulls back: its parts, float32 for every 128
# columns, are 17 % of that pass's bytes at rank 16 in bfloat16, written and read; a pass of its own
# would be 33 %.
_FUSED_RANK = 32
_RANK_BLOCK = 64
# sm_90, bfloat16, rank 16: 217 registers for relu, so two programs to a multiprocessor, 141 for
# gelu; 64 x 128 for gelu would spill 4.8 KB. Without anything to pull back, 56. Twice as many
# columns, or 8 warps, spill or halve what is under way.
_REDUCE = TileConfig(64, 128, 16, stages=4)
_REDUCE_FROM_PREACTIVATION = TileConfig(32, 64, 16, stages=4)
_REDUCE_PROGRAMS_PER_MULTIPROCESSOR = 4
_PARTS = 16


@cache
def _multiprocessors(device: torch.device) -> int:
    """1 under the Triton interpreter, whose programs run one after the other."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**30
    properties = torch.cuda.get_device_properties(device)
    return properties.shared_memory_per_block_optin  # type: ignore[attr-defined]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _power_of_two(number: int, low: int, high: int) -> int:
    """The smallest power of two that is not below ``number``, within low and high."""
    return min(max(1 << max(number - 1, 0).bit_length(), low), high)


def _stages(operand: Tensor, most: int, elements: int) -> int:
    """How many tiles of that many elements, ``most`` at most, fit into shared memory together."""
    tile_bytes = elements * operand.element_size()
    return max(1, min(most, _shared_bytes(operand.device) // tile_bytes))


def _precision(dtype: torch.dtype) -> str:
    """Every call makes several launches, so no plan is kept that would outlive the setting."""
    return "tf32" if dtype != torch.float32 or allows_tf32() else "ieee"


def _scale_arguments(scale: float | Tensor) -> tuple[Tensor | None, float]:
    return (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)


def tile_candidates(dtype: torch.dtype) -> Sequence[TileConfig]:
    """What tuning may try for the large product."""
    if dtype == torch.float32:
        return _TF32 if allows_tf32() else _SINGLE
    return [
        TileConfig(rows, columns, 64, group, warps, stages, maps)
        for maps in (False, True)
        for rows, columns, warps in ((128, 256, 8), (256, 128, 8), (128, 128, 8), (128, 128, 4))
        for group in (8, 16)
        for stages in (3, 4)
    ]


def _tile(operand: Tensor, columns: int, block_rank: int) -> TileConfig:
    """The largest tile that fits shared memory and gives every multiprocessor one."""
    rows, inner = operand.shape
    table = _HALF if operand.dtype != torch.float32 else _TF32 if allows_tf32() else _SINGLE
    for config in table:
        across = _power_of_two(columns, 16, config.columns)
        tiles = _ceil_div(rows, config.rows) * _ceil_div(columns, across)
        # The operands under way, and the update's, which stay until its dot has ended.
        depth = config.stages * config.inner + block_rank
        shared_bytes = depth * (config.rows + across) * operand.element_size()
        fits = shared_bytes <= _shared_bytes(operand.device)
        if fits and tiles >= _multiprocessors(operand.device):
            break
    maps = 2 * rows * columns * inner >= _MAPS_FROM_FLOPS and operand.dtype != torch.float32
    return replace(config, columns=across, maps=maps)


def _map_layout(matrix: Tensor) -> str:
    """How a tensor map can read the matrix: its "rows", its "columns", or "none"."""
    if matrix.is_cuda and torch.cuda.get_device_capability(matrix.device) < (9, 0):
        return "none"
    for name, view in (("rows", matrix), ("columns", matrix.t())):
        whole = view.stride(0) * view.element_size() % 16 == 0 and view.stride(0) >= view.shape[1]
        if view.stride(1) == 1 and whole and view.data_ptr() % 16 == 0 and view.numel():
            return name
    return "none"


def _combine(
    input: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    projection: Tensor,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
    output: Tensor,
    config: TileConfig,
    adds: bool = False,
) -> None:
    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, columns), rank = output.shape, up.shape[1]
    inner, maps = 0, "none"
    strides: tuple[int, ...] = (0, 0, 0, 0)
    operands: tuple[Any, Any] = (input, weight)
    if input is not None and weight is not None:
        inner, strides = input.shape[1], (*input.stride(), *weight.stride())
        if config.maps and inner and _map_layout(input) == "rows":
            maps = _map_layout(weight)
        if maps != "none":
            operands = _tensor_maps(input, weight, maps, config)
    tiles = _ceil_div(rows, config.rows) * _ceil_div(columns, config.columns)
    block_rank = _power_of_two(rank, 16, _RANK_BLOCK)
    launch(
        kernels.combine,
        (tiles,),
        *operands,
        *(bias, projection, up, output, *_scale_arguments(scale)),
        *(rows, columns, inner, rank, *strides, 0 if bias is None else bias.stride(0)),
        *(*projection.stride(), *up.stride()),
        ACTIVATION=activation,
        PRECISION=_precision(output.dtype),
        ADDS=adds,
        MAPS=maps,
        RANK_BLOCKS=_ceil_div(rank, block_rank),
        BLOCK_RANK=block_rank,
        BLOCK_ROWS=config.rows,
        BLOCK_COLUMNS=config.columns,
        BLOCK_INNER=config.inner,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _tensor_maps(input: Tensor, weight: Tensor, layout: str, config: TileConfig) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    of_input = TensorDescriptor.from_tensor(input, [config.rows, config.inner])
    if layout == "rows":
        return of_input, TensorDescriptor.from_tensor(weight, [config.columns, config.inner])
    return of_input, TensorDescriptor.from_tensor(weight.t(), [config.inner, config.columns])


def fused_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
    config: TileConfig | None = None,
) -> Tensor:
    """act(input weightᵀ + scale projection upᵀ + bias) in one launch."""
    output = input.new_empty((input.shape[0], weight.shape[0]))
    if output.numel():
        block_rank = _power_of_two(up.shape[1], 16, _RANK_BLOCK)
        config = config or _tile(input, weight.shape[0], block_rank)
        _combine(input, weight, bias, projection, up, scale, activation, output, config)
    return output


def library_product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
) -> Tensor:
    """The same through cuBLAS: without an activation it accumulates onto the update, which costs
    one write and one hidden read of the output; with one, the update goes with the activation."""
    if activation == "identity":
        output = input.new_empty((input.shape[0], weight.shape[0]))
        if output.numel():
            _combine(None, None, bias, projection, up, scale, "identity", output, _UPDATE)
            output.addmm_(input, weight.t())
        return output
    product = torch.mm if bias is None else partial(torch.addmm, bias)
    output = product(input, weight.t())
    if output.numel():
        _combine(None, None, None, projection, up, scale, activation, output, _UPDATE, adds=True)
    return output


def project(input: Tensor, factor: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """scale * input factorᵀ: (rows, K) and (r, K) to (rows, r)."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, inner), rank = input.shape, factor.shape[0]
    output = input.new_empty((rows, rank))
    block_rank = _power_of_two(rank, 16, _RANK_BLOCK)
    # The fewest rows keep every multiprocessor reading; 64 of them read A once for 128 KB of input.
    block_rows = 64 if rows >= 64 * _multiprocessors(input.device) else 16
    block_inner = _power_of_two(inner, 16, _PROJECT_INNER_BYTES // input.element_size())
    if output.numel():
        launch(
            kernels.project,
            (_ceil_div(rows, block_rows), _ceil_div(rank, block_rank)),
            *(input, factor, output, *_scale_arguments(scale)),
            *(rows, inner, rank, *input.stride(), *factor.stride()),
            PRECISION=_precision(input.dtype),
            BLOCK_ROWS=block_rows,
            BLOCK_INNER=block_inner,
            BLOCK_RANK=block_rank,
            num_warps=4,
            num_stages=_stages(input, 4, block_inner * (block_rows + block_rank)),
        )
    return output


@dataclass(frozen=True, slots=True)
class _Reduced:
    """What ``pull_back_and_reduce`` leaves: the pulled back gradient (or the upstream one), and the
    float32 parts of its products, None where not asked for."""

    grad: Tensor
    row_parts: Tensor | None
    column_parts: Tensor | None


def _reduce(
    upstream: Tensor,
    saved: Tensor | None,
    activation: str,
    factor: Tensor | None,
    projection: Tensor | None,
    keeps_grad: bool,
) -> _Reduced:
    """One launch: parts of grad factor (rows, r) and of gradᵀ projection (columns, r).

    The workspace is float32: rows * r for every 128 columns, and columns * r for every worker, of
    which there are at most 4 per multiprocessor over all tiles of columns.
    """
    from fuselab.ops.lora_linear import triton_kernels as kernels

    rows, columns = upstream.shape
    narrow = factor if factor is not None else projection
    rank = 1 if narrow is None else narrow.shape[1]
    from_preactivation = activation_named(activation).derivative_of == "preactivation"
    config = _REDUCE_FROM_PREACTIVATION if from_preactivation else _REDUCE
    block_rank = _power_of_two(rank, 16, _RANK_BLOCK)
    block_columns = _power_of_two(columns, 16, config.columns * 2 // upstream.element_size())
    block_rows = _power_of_two(rows, 16, config.rows)
    across, deep = _ceil_div(columns, block_columns), _ceil_div(rank, block_rank)
    programs = _multiprocessors(upstream.device) * _REDUCE_PROGRAMS_PER_MULTIPROCESSOR
    workers = max(1, min(_ceil_div(rows, block_rows), programs // (across * deep)))
    rows_per_worker = _ceil_div(_ceil_div(rows, workers), block_rows) * block_rows
    workers = _ceil_div(rows, rows_per_worker)
    grad, row_parts, column_parts = None, None, None
    if saved is not None and keeps_grad:
        grad = upstream.new_empty((rows, columns))
    if factor is not None:
        row_parts = upstream.new_empty((across, rows, rank), dtype=torch.float32)
    if projection is not None:
        column_parts = upstream.new_empty((workers, columns, rank), dtype=torch.float32)
    launch(
        kernels.pull_back_and_reduce,
        (workers * across, deep),
        *(upstream, saved, factor, projection, grad, row_parts, column_parts),
        *(rows, columns, rank, rows_per_worker, *upstream.stride()),
        *((0, 0) if factor is None else factor.stride()),
        *((0, 0) if projection is None else projection.stride()),
        ACTIVATION=activation,
        PRECISION=_precision(upstream.dtype),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_RANK=block_rank,
        num_warps=config.warps,
        num_stages=_stages(upstream, config.stages, block_rows * (2 * block_columns + block_rank)),
    )
    return _Reduced(upstream if grad is None else grad, row_parts, column_parts)


def _column_parts(matrix: Tensor, projection: Tensor | None) -> Tensor:
    """Parts of matrixᵀ projection, none where the matrix has no column."""
    if matrix.shape[1] == 0:
        return matrix.new_empty((0, 0), dtype=torch.float32)
    parts = _reduce(matrix, None, "identity", None, projection, keeps_grad=False).column_parts
    assert parts is not None
    return parts


def _sum(parts: Tensor, output: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """output = scale * parts.sum(0)."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    if output.numel():
        launch(
            kernels.sum_parts,
            (_ceil_div(output.numel(), 256),),
            *(parts, output, *_scale_arguments(scale)),
            *(parts.shape[0], output.numel(), output.shape[1], *output.stride()),
            PARTS=_power_of_two(parts.shape[0], 1, _PARTS),
            BLOCK=256,
        )
    return output


def forward(
    product: Product,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> Tensor:
    """S, then ``product``. The workspace is S: rows * r."""
    if input.shape[:-1].numel() * weight.shape[0] == 0:
        return empty_output(input, weight)
    x = as_rows(input)
    projection = project(x, lora_a)
    output = product(x, weight, bias, projection, lora_b, scale, activation)
    return output.view(*input.shape[:-1], weight.shape[0])


def backward(
    product: Product,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> Gradients:
    """Gradients of input, lora_a and lora_b; the workspace is S, its gradient, the pre-activation's
    gradient (and for gelu, gelu_tanh and silu the pre-activation), and ``_reduce``'s parts."""
    needs_input, _, _, needs_a, needs_b = needs
    grad_input = grad_a = grad_b = None
    x, upstream = as_rows(input), as_rows(grad_output)
    if x.shape[0] == 0:
        return (
            input.new_empty(input.shape) if needs_input else None,
            None,
            None,
            lora_a.new_zeros(lora_a.shape) if needs_a else None,
            lora_b.new_zeros(lora_b.shape) if needs_b else None,
        )
    needs_projection = needs_input or needs_a
    of_preactivation = activation_named(activation).derivative_of == "preactivation"
    projection = project(x, lora_a) if needs_b or of_preactivation else None
    saved = None if output is None else as_rows(output)
    if of_preactivation:
        saved = product(x, weight, bias, projection, lora_b, scale, "identity")
    if upstream.numel() == 0:  # without columns there is nothing to pull back
        saved = None

    fused = lora_a.shape[0] <= _FUSED_RANK and upstream.numel() > 0
    reduced = _Reduced(upstream, None, None)
    if fused or saved is not None:
        reduced = _reduce(
            upstream,
            saved,
            activation,
            lora_b if fused and needs_projection else None,
            projection if fused and needs_b else None,
            keeps_grad=needs_input or not fused,
        )
    if needs_b:
        parts = reduced.column_parts
        if parts is None:
            parts = _column_parts(reduced.grad, projection)
        grad_b = _sum(parts, lora_b.new_empty(lora_b.shape), scale)
    if needs_projection:
        if reduced.row_parts is None:
            grad_projection = project(reduced.grad, lora_b.t(), scale)
        else:
            grad_projection = _sum(
                reduced.row_parts, x.new_empty((x.shape[0], lora_a.shape[0])), scale
            )
        if needs_input:
            grad_input = product(
                reduced.grad, weight.t(), None, grad_projection, lora_a.t(), 1.0, "identity"
            ).view(input.shape)
        if needs_a:
            grad_a = lora_a.new_empty(lora_a.shape)
            _sum(_column_parts(x, grad_projection), grad_a.t())
    return grad_input, None, None, grad_a, grad_b
