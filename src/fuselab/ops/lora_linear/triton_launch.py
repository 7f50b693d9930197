"""Launchers of the Triton kernels: S, the product added to its update, the backward's sums."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.grid import spread_rows
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops.lora_linear import configs
from fuselab.ops.lora_linear.operands import Layer
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch, triton_float
from fuselab.runtime.tuning import Config

Gradients = tuple[Tensor | None, ...]


def _map_layout(matrix: Tensor) -> str:
    """Return how a tensor map can read the matrix: by its "rows", its "columns", or "none"."""
    if matrix.is_cuda and torch.cuda.get_device_capability(matrix.device) < (9, 0):
        return "none"
    for name, view in (("rows", matrix), ("columns", matrix.t())):
        whole = view.stride(0) * view.element_size() % 16 == 0 and view.stride(0) >= view.shape[1]
        if view.stride(1) == 1 and whole and view.data_ptr() % 16 == 0 and view.numel():
            return name
    return "none"


def _tensor_maps(input: Tensor, weight: Tensor, layout: str, config: Config) -> tuple[Any, Any]:
    from triton.tools.tensor_descriptor import TensorDescriptor

    of_input = TensorDescriptor.from_tensor(input, [config.rows, config.inner])
    if layout == "rows":
        return of_input, TensorDescriptor.from_tensor(weight, [config.columns, config.inner])
    return of_input, TensorDescriptor.from_tensor(weight.t(), [config.inner, config.columns])


def product(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    projection: Tensor,
    up: Tensor,
    scale: float | Tensor,
    activation: str,
    config: Config | None = None,
) -> Tensor:
    """Compute act(input weightᵀ + scale projection upᵀ + bias) in one launch."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, inner), (columns, rank) = input.shape, up.shape
    output = input.new_empty((rows, columns))
    if output.numel() == 0:
        return output
    config = config or configs.product_tile(input, weight, rank)
    maps, operands = "none", (input, weight)
    if config.maps and inner and _map_layout(input) == "rows":
        maps = _map_layout(weight)
    if maps != "none":
        operands = _tensor_maps(input, weight, maps, config)
    block_rank = power_of_two(rank, 16, configs.RANK_BLOCK)
    launch(
        kernels.combine,
        (ceil_div(rows, config.rows) * ceil_div(columns, config.columns),),
        *operands,
        *(bias, projection, up, output, *triton_float(scale)),
        *(rows, columns, inner, rank, *input.stride(), *weight.stride()),
        *(0 if bias is None else bias.stride(0), *projection.stride(), *up.stride()),
        ACTIVATION=activation,
        PRECISION=input_precision(output.dtype),
        MAPS=maps,
        RANK_BLOCKS=ceil_div(rank, block_rank),
        BLOCK_RANK=block_rank,
        BLOCK_ROWS=config.rows,
        BLOCK_COLUMNS=config.columns,
        BLOCK_INNER=config.inner,
        GROUP=configs.GROUP,
        num_warps=config.warps,
        num_stages=config.stages,
    )
    return output


def project(input: Tensor, factor: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Compute scale * input factorᵀ: (rows, K) and (r, K) to (rows, r)."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    (rows, inner), rank = input.shape, factor.shape[0]
    output = input.new_empty((rows, rank))
    block_rank = power_of_two(rank, 16, configs.RANK_BLOCK)
    # A tile of 64 rows reads all of A once; smaller tiles are used where 64 would leave a quarter
    # of the multiprocessors idle.
    enough = multiprocessors(input.device) * 3 // 4
    block_rows = next((size for size in (64, 32) if ceil_div(rows, size) >= enough), 16)
    block_inner = power_of_two(inner, 16, configs.PROJECT_INNER_BYTES // input.element_size())
    if output.numel():
        launch(
            kernels.project,
            (ceil_div(rows, block_rows), ceil_div(rank, block_rank)),
            *(input, factor, output, *triton_float(scale)),
            *(rows, inner, rank, *input.stride(), *factor.stride()),
            PRECISION=input_precision(input.dtype),
            BLOCK_ROWS=block_rows,
            BLOCK_INNER=block_inner,
            BLOCK_RANK=block_rank,
            num_warps=4,
            num_stages=configs.stages(input, 4, block_inner * (block_rows + block_rank)),
        )
    return output


@dataclass(frozen=True, slots=True)
class _Reduced:
    """The results of ``pull_back_and_reduce``: the pulled back gradient (or the upstream one), and
    the float32 parts of its products, None where not asked for."""

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
    """Launch ``pull_back_and_reduce`` once, for parts of grad factor (rows, r) and of gradᵀ
    projection (columns, r).

    The workspace is float32: rows * r for every tile of columns, and columns * r for every worker.
    There are at most ``config.programs`` per multiprocessor over all tiles of columns.
    """
    from fuselab.ops.lora_linear import triton_kernels as kernels

    rows, columns = upstream.shape
    narrow = factor if factor is not None else projection
    rank = 1 if narrow is None else narrow.shape[1]
    block_rank = power_of_two(rank, 16, configs.RANK_BLOCK)
    block_columns = power_of_two(columns, 16, config.columns)
    block_rows = power_of_two(rows, 16, config.rows)
    across, deep = ceil_div(columns, block_columns), ceil_div(rank, block_rank)
    programs = multiprocessors(upstream.device) * config.programs
    workers, rows_per_worker = spread_rows(rows, block_rows, programs // (across * deep))
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
        num_stages=configs.stages(
            upstream, config.stages, block_rows * (2 * block_columns + block_rank)
        ),
    )
    return _Reduced(upstream if grad is None else grad, row_parts, column_parts)


def _column_parts(matrix: Tensor, projection: Tensor | None) -> Tensor:
    """Return parts of matrixᵀ projection; there are none if the matrix has no column."""
    if matrix.shape[1] == 0:
        return matrix.new_empty((0, 0), dtype=torch.float32)
    config = configs.reduction(matrix, "identity")
    parts = _reduce(matrix, None, "identity", None, projection, False, config).column_parts
    assert parts is not None
    return parts


def _sum(parts: Tensor, output: Tensor, scale: float | Tensor = 1.0) -> Tensor:
    """Write scale * parts.sum(0) to ``output``, and return it."""
    from fuselab.ops.lora_linear import triton_kernels as kernels

    together = power_of_two(parts.shape[0], 1, configs.SUMMED_PARTS)
    block = min(configs.SUMMED_ELEMENTS, configs.SUMMED_NUMBERS // together)
    if output.numel():
        launch(
            kernels.sum_parts,
            (ceil_div(output.numel(), block),),
            *(parts, output, *triton_float(scale)),
            *(parts.shape[0], output.numel(), output.shape[1], *output.stride()),
            PARTS=together,
            BLOCK=block,
        )
    return output


def forward(input: Tensor, *arguments: Any) -> Tensor:
    """Compute the output in two launches; the workspace is S: rows * r."""
    weight, bias, lora_a, lora_b, scale, activation = Layer(*arguments)
    if input.shape[:-1].numel() * weight.shape[0] == 0:
        return empty_output(input, weight)
    x = as_rows(input)
    output = product(x, weight, bias, project(x, lora_a), lora_b, scale, activation)
    return output.view(*input.shape[:-1], weight.shape[0])


def pull_through(grad: Tensor, weight: Tensor, grad_projection: Tensor, lora_a: Tensor) -> Tensor:
    """Compute grad W + grad_projection A in one launch: (rows, N) and (rows, r) to (rows, K)."""
    return product(grad, weight.t(), None, grad_projection, lora_a.t(), 1.0, "identity")


def without_rows(needs: Sequence[bool], input: Tensor, layer: Layer) -> Gradients:
    """Return the gradients for an ``input`` without rows."""
    needs_input, _, _, needs_a, needs_b = needs
    return (
        input.new_empty(input.shape) if needs_input else None,
        None,
        None,
        layer.lora_a.new_zeros(layer.lora_a.shape) if needs_a else None,
        layer.lora_b.new_zeros(layer.lora_b.shape) if needs_b else None,
    )


def backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *rest: Any
) -> Gradients:
    """Return the gradients of input, lora_a and lora_b, None for the frozen tensors.

    The workspace is S, its gradient, the pre-activation's gradient (and for gelu, gelu_tanh and
    silu the pre-activation), and the parts of ``_reduce``.
    """
    layer = Layer(*rest)
    weight, bias, lora_a, lora_b, scale, activation = layer
    needs_input, _, _, needs_a, needs_b = needs
    grad_input = grad_a = grad_b = None
    x, upstream = as_rows(input), as_rows(grad_output)
    if x.shape[0] == 0:
        return without_rows(needs, input, layer)
    needs_projection = needs_input or needs_a
    of_preactivation = activation_named(activation).derivative_of == "preactivation"
    projection = project(x, lora_a) if needs_b or of_preactivation else None
    saved = None if output is None else as_rows(output)
    if of_preactivation:
        assert projection is not None
        saved = product(x, weight, bias, projection, lora_b, scale, "identity")
    if upstream.numel() == 0:  # without columns there is nothing to pull back
        saved = None

    fused = lora_a.shape[0] <= configs.FUSED_RANK and upstream.numel() > 0
    reduced = _Reduced(upstream, None, None)
    if fused or saved is not None:
        reduced = _reduce(
            upstream,
            saved,
            activation,
            lora_b if fused and needs_projection else None,
            projection if fused and needs_b else None,
            needs_input or not fused,
            configs.reduction(upstream, activation),
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
            grad_input = pull_through(reduced.grad, weight, grad_projection, lora_a)
            grad_input = grad_input.view(input.shape)
        if needs_a:
            grad_a = lora_a.new_empty(lora_a.shape)
            _sum(_column_parts(x, grad_projection), grad_a.t())
    return grad_input, None, None, grad_a, grad_b
