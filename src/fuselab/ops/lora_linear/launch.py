"""Launching the kernels: S, the product on top of its update, and the sums of the backward.

Two implementations share all but the large product. ``fused_product`` is one Triton kernel with one
accumulator; ``fused_forward`` makes S in it too, where tuning says so. ``library_product`` leaves
x Wᵀ to cuBLAS and adds the update in one pass over the output: together with the activation, which
eager's pass over the output would be there for, or as what cuBLAS accumulates onto.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.activations import activation as activation_named
from fuselab.ops.linear_activation.product import as_rows, empty_output
from fuselab.ops.lora_linear import tiles
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config

# (step, input, weight, bias, projection, up, scale, activation), all matrices, to the output; step
# is "" in the forward and "_backward" in the backward, whose tiles are tuned apart.
Product = Callable[..., Tensor]
Gradients = tuple[Tensor | None, ...]


def _scale_arguments(scale: float | Tensor) -> tuple[Tensor | None, float]:
    return (scale, 0.0) if isinstance(scale, Tensor) else (None, scale)


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
    config: Config,
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
    block_rank = power_of_two(rank, 16, tiles.RANK_BLOCK)
    launch(
        kernels.combine,
        (ceil_div(rows, config.rows) * ceil_div(columns, config.columns),),
        *operands,
        *(bias, projection, up, output, *_scale_arguments(scale)),
        *(rows, columns, inner, rank, *strides, 0 if bias is None else bias.stride(0)),
        *(*projection.stride(), *up.stride()),
        ACTIVATION=activation,
        PRECISION=input_precision(output.dtype),
        ADDS=adds,
        MAPS=maps,
        RANK_BLOCKS=ceil_div(rank, block_rank),
        BLOCK_RANK=block_rank,
        BLOCK_ROWS=config.rows,
        BLOCK_COLUMNS=config.columns,
        BLOCK_INNER=16 if input is None else config.inner,
        GROUP=8 if input is None else config.group,
        num_warps=config.warps,
        num_stages=None if input is None else config.stages,
    )


def _tensor_maps(input: Tensor, weight: Tensor, layout: str, config: Config) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    of_input = TensorDescriptor.from_tensor(input, [config.rows, config.inner])
    if layout == "rows":
        return of_input, TensorDescriptor.from_tensor(weight, [config.columns, config.inner])
    return of_input, TensorDescriptor.from_tensor(weight.t(), [config.inner, config.columns])


def fused_product(
    step: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """act(input weightᵀ + scale projection upᵀ + bias) in one launch."""
    rows, columns = input.shape[0], weight.shape[0]
    if rows * columns == 0:
        return input.new_empty((rows, columns))
    config = config or tiles.product_tile(f"triton{step}", input, weight, up.shape[1])
    if config.programs and _map_layout(input) == "rows" and _map_layout(weight) != "none":
        return _adapt(input, weight, bias, projection, up, scale, activation, config)
    output = input.new_empty((rows, columns))
    _combine(input, weight, bias, projection, up, scale, activation, output, config)
    return output


def fused_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    lora_a: Tensor,
    lora_b: Tensor,
    scale: float,
    activation: str,
) -> Tensor:
    """One launch and no workspace where the tile is one of ``adapt`` and tensor maps can read the
    operands, else ``forward`` of ``fused_product``."""
    x = as_rows(input)
    product: Product = fused_product
    if x.shape[0] * weight.shape[0]:
        config = tiles.product_tile("triton", x, weight, lora_a.shape[0])
        maps = (_map_layout(operand) for operand in (x, weight, lora_a))
        if config.programs and all(layout == "rows" for layout in maps):
            operands = (x, weight, bias, None, lora_b, scale, activation, config)
            return _adapt(*operands, factor=lora_a).view(*input.shape[:-1], weight.shape[0])
        product = partial(fused_product, config=config)
    return forward(product, input, weight, bias, lora_a, lora_b, scale, activation)


def _adapt(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor | None,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
    config: Config,
    factor: Tensor | None = None,
) -> Tensor:
    from triton.tools.tensor_descriptor import TensorDescriptor

    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, inner), (columns, rank) = input.shape, up.shape
    output = input.new_empty((rows, columns))
    layout, block_rank = _map_layout(weight), power_of_two(rank, 16, tiles.FUSED_RANK)
    map_of_factor = None
    if factor is not None:
        map_of_factor = TensorDescriptor.from_tensor(factor, [block_rank, config.inner])
    count = ceil_div(rows, config.rows) * ceil_div(columns, config.columns)
    launch(
        kernels.adapt,
        (min(count, multiprocessors(input.device) * config.programs),),
        *(*_tensor_maps(input, weight, layout, config), map_of_factor),
        *(projection, bias, up, output, *_scale_arguments(scale)),
        *(rows, columns, inner, rank, 0 if bias is None else bias.stride(0), *up.stride()),
        ACTIVATION=activation,
        MAPS=layout,
        BLOCK_RANK=block_rank,
        BLOCK_ROWS=config.rows,
        BLOCK_COLUMNS=config.columns,
        BLOCK_INNER=config.inner,
        GROUP=config.group,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return output


def library_product(
    step: str,
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
    accumulates = activation == "identity"
    if accumulates:
        output = input.new_empty((input.shape[0], weight.shape[0]))
    else:
        multiply = torch.mm if bias is None else partial(torch.addmm, bias)
        output, bias = multiply(input, weight.t()), None
    if output.numel():
        config = tiles.update_tile(output)
        operands = (bias, projection, up, scale, activation, output, config)
        _combine(None, None, *operands, adds=not accumulates)
    return output.addmm_(input, weight.t()) if accumulates else output


def project(input: Tensor, factor: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """scale * input factorᵀ: (rows, K) and (r, K) to (rows, r)."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, inner), rank = input.shape, factor.shape[0]
    output = input.new_empty((rows, rank))
    block_rank = power_of_two(rank, 16, tiles.RANK_BLOCK)
    # 64 rows read all of A once; fewer where that leaves a quarter of the multiprocessors idle.
    enough = multiprocessors(input.device) * 3 // 4
    block_rows = next((size for size in (64, 32) if ceil_div(rows, size) >= enough), 16)
    block_inner = power_of_two(inner, 16, tiles.PROJECT_INNER_BYTES // input.element_size())
    if output.numel():
        launch(
            kernels.project,
            (ceil_div(rows, block_rows), ceil_div(rank, block_rank)),
            *(input, factor, output, *_scale_arguments(scale)),
            *(rows, inner, rank, *input.stride(), *factor.stride()),
            PRECISION=input_precision(input.dtype),
            BLOCK_ROWS=block_rows,
            BLOCK_INNER=block_inner,
            BLOCK_RANK=block_rank,
            num_warps=4,
            num_stages=tiles.stages(input, 4, block_inner * (block_rows + block_rank)),
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
    config: Config,
) -> _Reduced:
    """One launch: parts of grad factor (rows, r) and of gradᵀ projection (columns, r).

    The workspace is float32: rows * r for every tile of columns, and columns * r for every worker,
    of which there are at most ``config.programs`` per multiprocessor over all tiles of columns.
    """
    from fuselab.ops.lora_linear import triton_kernels as kernels

    rows, columns = upstream.shape
    narrow = factor if factor is not None else projection
    rank = 1 if narrow is None else narrow.shape[1]
    block_rank = power_of_two(rank, 16, tiles.RANK_BLOCK)
    block_columns = power_of_two(columns, 16, config.columns)
    block_rows = power_of_two(rows, 16, config.rows)
    across, deep = ceil_div(columns, block_columns), ceil_div(rank, block_rank)
    programs = multiprocessors(upstream.device) * config.programs
    workers = max(1, min(ceil_div(rows, block_rows), programs // (across * deep)))
    rows_per_worker = ceil_div(ceil_div(rows, workers), block_rows) * block_rows
    workers = ceil_div(rows, rows_per_worker)
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
        PRECISION=input_precision(upstream.dtype),
        BLOCK_ROWS=block_rows,
        BLOCK_COLUMNS=block_columns,
        BLOCK_RANK=block_rank,
        num_warps=config.warps,
        num_stages=tiles.stages(
            upstream, config.stages, block_rows * (2 * block_columns + block_rank)
        ),
    )
    return _Reduced(upstream if grad is None else grad, row_parts, column_parts)


def _column_parts(matrix: Tensor, projection: Tensor | None) -> Tensor:
    """Parts of matrixᵀ projection, none where the matrix has no column."""
    if matrix.shape[1] == 0:
        return matrix.new_empty((0, 0), dtype=torch.float32)
    config = tiles.default_reduction(matrix, "identity")
    parts = _reduce(matrix, None, "identity", None, projection, False, config).column_parts
    assert parts is not None
    return parts


def _sum(parts: Tensor, output: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """output = scale * parts.sum(0)."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    together = power_of_two(parts.shape[0], 1, tiles.SUMMED_PARTS)
    block = min(tiles.SUMMED_ELEMENTS, tiles.SUMMED_NUMBERS // together)
    if output.numel():
        launch(
            kernels.sum_parts,
            (ceil_div(output.numel(), block),),
            *(parts, output, *_scale_arguments(scale)),
            *(parts.shape[0], output.numel(), output.shape[1], *output.stride()),
            PARTS=together,
            BLOCK=block,
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
    output = product("", x, weight, bias, projection, lora_b, scale, activation)
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
        saved = product("", x, weight, bias, projection, lora_b, scale, "identity")
    if upstream.numel() == 0:  # without columns there is nothing to pull back
        saved = None

    fused = lora_a.shape[0] <= tiles.FUSED_RANK and upstream.numel() > 0
    reduced = _Reduced(upstream, None, None)
    if fused or saved is not None:
        reduced = _reduce(
            upstream,
            saved,
            activation,
            lora_b if fused and needs_projection else None,
            projection if fused and needs_b else None,
            needs_input or not fused,
            tiles.reduction(upstream, activation, lora_a.shape[0]),
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
            operands = (reduced.grad, weight.t(), None, grad_projection, lora_a.t())
            grad_input = product("_backward", *operands, 1.0, "identity").view(input.shape)
        if needs_a:
            grad_a = lora_a.new_empty(lora_a.shape)
            _sum(_column_parts(x, grad_projection), grad_a.t())
    return grad_input, None, None, grad_a, grad_b
