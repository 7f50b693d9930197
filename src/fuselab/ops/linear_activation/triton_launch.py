"""Launchers of the Triton kernels with tiles from ``configs``, and the remaining gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.activations import activation as activation_named
from fuselab.ops._shared.grid import spread_rows
from fuselab.ops._shared.matrices import as_rows, empty_output
from fuselab.ops.add_mul_activation.triton_launch import add_rows
from fuselab.ops.add_mul_activation.triton_launch import backward as pull_back
from fuselab.ops.linear_activation.configs import SHALLOW_DEPTH, backward_tiles, forward_tiles, key
from fuselab.ops.linear_activation.product_gradients import gradients
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.matmul_precision import input_precision
from fuselab.runtime.triton_launch import launch
from fuselab.runtime.tuning import Config, chosen

NAME = "fuselab::linear_activation"


def supports(input: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> str | None:
    return "it accumulates in float32" if input.dtype == torch.float64 else None


def supports_backward(needs: Sequence[bool], grad_output: Tensor, *saved: Any) -> str | None:
    return "it accumulates in float32" if grad_output.dtype == torch.float64 else None


def configs(input: Tensor, weight: Tensor, *rest: Any) -> Sequence[Config]:
    """Return the candidate tiles of the forward."""
    return forward_tiles(as_rows(input), weight)


def configs_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor | None, input: Tensor, *rest: Any
) -> Sequence[Config]:
    """Return the candidate tiles of the shallow backward; for a deeper one there are none."""
    shallow = input.shape[-1] <= SHALLOW_DEPTH
    rows, columns = as_rows(grad_output).shape
    return backward_tiles(rows, columns) if shallow else ()


def forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    tile: Config | None = None,
) -> Tensor:
    """Launch ``forward_shallow`` once up to a depth of 32, else ``forward``. ``tile`` replaces the
    tuned or default one."""
    from fuselab.ops.linear_activation import triton_kernels as kernels

    output = empty_output(input, weight)
    if output.numel() == 0:
        return output
    x = as_rows(input)
    (rows, depth), columns = x.shape, weight.shape[0]
    strides = (*x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0))
    tile = tile or chosen(NAME, "triton", key(x, weight), forward_tiles(x, weight))
    down, across = ceil_div(rows, tile.rows), ceil_div(columns, tile.columns)
    precision = input_precision(input.dtype)
    constants: dict[str, Any] = {"ACTIVATION": activation, "PRECISION": precision}
    constants |= {"ROWS": tile.rows, "COLUMNS": tile.columns}
    if depth <= SHALLOW_DEPTH:
        programs = multiprocessors(input.device) * tile.programs
        workers = max(1, min(down, programs // across))
        launch(
            kernels.forward_shallow,
            (workers * across,),
            *(x, weight, bias, output, rows, columns, depth, workers),
            *strides,
            **constants,
            DEPTH=power_of_two(depth, 16, SHALLOW_DEPTH),
            num_warps=tile.warps,
        )
        return output
    launch(
        kernels.forward,
        (down * across,),
        *(x, weight, bias, output, rows, columns, depth),
        *strides,
        **constants,
        WHOLE_DEPTH=depth % tile.depth == 0,
        DEPTH=tile.depth,
        GROUP=tile.group,
        num_warps=tile.warps,
        num_stages=tile.stages,
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
    """Return the gradients of input, weight and bias.

    Up to a depth of 32 one pass gives those of weight and bias, and writes the pre-activation's
    only if the input's is needed; deeper layers take ``gradients``. The workspace is float32
    (workers, columns, depth) and float64 (workers, columns): 2.5 MB on 132 multiprocessors for 512
    columns of depth 13.
    """
    depth = weight.shape[1]
    if not (needs[1] and 0 < depth <= SHALLOW_DEPTH and grad_output.numel()):
        return gradients(pull_back, needs, grad_output, output, input, weight, bias, activation)
    from fuselab.ops.linear_activation import triton_kernels as kernels

    x, grad = as_rows(input), as_rows(grad_output)
    rows, columns = grad.shape
    total = x.new_empty((rows, columns)) if needs[0] and activation != "identity" else None
    tile = chosen(NAME, "triton_backward", key(x, weight), backward_tiles(rows, columns))
    across = ceil_div(columns, tile.columns)
    programs = multiprocessors(grad.device) * tile.programs
    workers, rows_per_worker = spread_rows(rows, tile.rows, programs // across)
    weight_sums = x.new_empty((workers, columns * depth), dtype=torch.float32)
    bias_sums = x.new_empty((workers, columns), dtype=torch.float64) if needs[2] else None
    launch(
        kernels.backward_shallow,
        (workers * across,),
        *(grad, output, x, weight, bias, total, weight_sums, bias_sums),
        *(rows, columns, depth, rows_per_worker),
        *(*grad.stride(), *x.stride(), *weight.stride(), 0 if bias is None else bias.stride(0)),
        ACTIVATION=activation,
        PRECISION=input_precision(input.dtype),
        RECOMPUTE=activation_named(activation).derivative_of == "preactivation",
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=power_of_two(depth, 16, SHALLOW_DEPTH),
        num_warps=tile.warps,
    )
    grad_weight = x.new_empty((columns, depth))
    grad_bias = x.new_empty((columns,)) if needs[2] else None
    for sums, result in ((weight_sums, grad_weight), (bias_sums, grad_bias)):
        if sums is not None and result is not None:
            add_rows(sums, result)
    grad_input = None
    if needs[0]:
        grad_input = torch.mm(grad if total is None else total, weight).view(input.shape)
    return grad_input, grad_weight, grad_bias
