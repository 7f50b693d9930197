"""Launchers of the Triton kernels of one logit per row."""

from __future__ import annotations

import torch
from torch import Tensor

from fuselab.ops._shared.grid import spread_rows
from fuselab.ops.add_mul_activation.triton_launch import add_rows
from fuselab.ops.linear_sigmoid.layout import Rows, backward_of, forward_of
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div, power_of_two
from fuselab.runtime.triton_launch import launch

TILE = 4096  # input elements that a program of 4 warps has at a time: 32 per thread
# On sm_90 nothing spills at a depth of 256 (168 registers at most, the backward of a float32 loss);
# loads and stores of rows are 128 bits wide.
PROGRAMS_PER_MULTIPROCESSOR = 8
# The backward of a loss has whole rows in a tile up to this depth. For deeper rows a separate pass
# computes the logit's gradient, and the input is read twice.
WHOLE_DEPTH = 1024


def _tile(depth: int) -> tuple[int, int]:
    """Return the rows and the depth of a tile. There are seven shapes, for each one is compiled."""
    along = max(16, min(power_of_two(depth), WHOLE_DEPTH))
    return TILE // along, along


def _programs(device: torch.device) -> int:
    return multiprocessors(device) * PROGRAMS_PER_MULTIPROCESSOR


def _add_up(sums: Tensor, result: Tensor) -> None:
    add_rows(sums, result, 16 if result.numel() > 1 else 1)


def _per_row(
    of: Rows, target: Tensor | None, grad: Tensor | None, output: Tensor, kind: str
) -> None:
    """Launch ``forward``; for a "loss" a second launch adds the programs' sums."""
    from fuselab.ops.linear_sigmoid import triton_kernels as kernels

    tile, along = _tile(of.depth)
    # Without sums over rows a program has one tile, and the scheduler balances the programs.
    programs = _programs(of.input.device) if kind == "loss" else of.rows
    workers, per_worker = spread_rows(of.rows, tile, programs)
    sums = of.input.new_empty((workers, 1), dtype=torch.float64) if kind == "loss" else None
    launch(
        kernels.forward,
        (workers,),
        *(of.input, of.weight, of.bias, target, grad, output if sums is None else sums),
        *(of.rows, of.divisor, of.depth, per_worker),
        *(*of.input.stride(), of.weight.stride(0)),
        *(0 if vector is None else vector.stride(0) for vector in (target, grad)),
        KIND=kind,
        ROWS=tile,
        DEPTH=along,
    )
    if sums is not None:
        _add_up(sums, output)


@forward_of
def forward(of: Rows, target: Tensor | None, output: Tensor) -> None:
    """Compute sigmoid or, with a target and a reduction, the loss."""
    _per_row(of, target, None, output, of.kind)


@backward_of
def backward(of: Rows, upstream: Tensor, kept: Tensor, grads: tuple[Tensor | None, ...]) -> None:
    """Compute the gradients of input, weight and bias; ``kept`` is the output of sigmoid or a
    loss's target.

    There is one launch over the input and one for each gradient that is a sum. The workspace is
    float32 (workers, depth) and float64 (workers,): 1.1 MB on 132 multiprocessors at a depth of
    256. Above ``WHOLE_DEPTH`` the gradient of a loss's logits takes another 4 bytes per row.
    """
    from fuselab.ops.linear_sigmoid import triton_kernels as kernels

    grad_input, grad_weight, grad_bias = grads
    kind = of.kind
    if kind != "sigmoid" and of.depth > WHOLE_DEPTH:
        of_logit = of.input.new_empty(of.rows, dtype=torch.float32)
        _per_row(of, kept, upstream, of_logit, "gradient")
        kind, kept = "given", of_logit
    tile, along = _tile(of.depth)
    across = ceil_div(of.depth, along)
    programs = max(1, _programs(of.input.device) // across)
    workers, per_worker = spread_rows(of.rows, tile, programs)
    weight_sums = bias_sums = None
    if grad_weight is not None:
        weight_sums = of.input.new_empty((workers, of.depth), dtype=torch.float32)
    if grad_bias is not None:
        bias_sums = of.input.new_empty((workers, 1), dtype=torch.float64)
    launch(
        kernels.backward,
        (workers * across,),
        *(None if kind == "given" else upstream, kept, of.input, of.weight, of.bias, grad_input),
        *(weight_sums, bias_sums, of.rows, of.divisor, of.depth, per_worker),
        *(upstream.stride(0), kept.stride(0), *of.input.stride(), of.weight.stride(0)),
        KIND={"losses": "loss"}.get(kind, kind),
        ROWS=tile,
        DEPTH=along,
    )
    for sums, result in ((weight_sums, grad_weight), (bias_sums, grad_bias)):
        if sums is not None and result is not None:
            _add_up(sums, result)
