"""Launchers of the Triton kernels: which one runs, and how many pairs a program has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops._shared.grid import triton_arithmetic
from fuselab.ops.generalized_box_iou_loss import triton_kernels as kernels
from fuselab.ops.generalized_box_iou_loss.configs import chosen
from fuselab.ops.generalized_box_iou_loss.layout import (
    Epsilon,
    Pairs,
    arithmetic,
    backward_of,
    forward_of,
)
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.triton_launch import launch, triton_float
from fuselab.runtime.tuning import Config

_FINISH_BLOCK = 1024
_COUNT_BLOCK = 512


@forward_of
def forward(where: Pairs, reduction: str, eps: Epsilon, loss: Tensor) -> None:
    """Compute the loss by one launch, or by two for a reduction, with a workspace of one float64
    per program ("padded": two)."""
    config = chosen("triton", where, reduction)
    programs = ceil_div(where.count, config.block)
    if reduction == "none":
        _launch(kernels.forward, programs, config, where, (where.first, where.second, loss), eps)
        return
    padded = reduction == "padded"
    resident = multiprocessors(where.first.device) * config.programs
    programs = min(programs, resident)
    sums = where.first.new_empty(programs * (2 if padded else 1), dtype=torch.float64)
    operands = (where.first, where.second, sums)
    _launch(kernels.reduce, programs, config, where, operands, eps, PADDED=padded)
    launch(
        kernels.finish,
        (1,),
        *(sums, loss, programs, where.count),
        MEAN=reduction == "mean",
        PADDED=padded,
        BLOCK=_FINISH_BLOCK,
    )


@backward_of
def backward(
    where: Pairs,
    upstream: Tensor,
    reduction: str,
    eps: Epsilon,
    grads: tuple[Tensor | None, ...],
) -> None:
    """Compute both gradients in one launch. "padded" first counts the boxes, in two more launches
    with a workspace of one int64."""
    valid = _count_valid(where) if reduction == "padded" else None
    config = chosen("triton_backward", where, reduction)
    _launch(
        kernels.backward,
        ceil_div(where.count, config.block),
        config,
        where,
        (upstream, where.first, where.second, valid, *grads),
        eps,
        where.gradient_strides,
        ONE_GRADIENT=not any(where.gradient_strides),
        MEAN=reduction == "mean",
        PADDED=reduction == "padded",
    )


def _count_valid(where: Pairs) -> Tensor:
    """Return how many second boxes are no padding, as one int64 on the device."""
    valid = torch.zeros(1, dtype=torch.int64, device=where.second.device)
    programs = ceil_div(where.count, _COUNT_BLOCK)
    launch(
        kernels.count_valid,
        (min(programs, 2 * multiprocessors(valid.device)),),
        *(where.second, valid, *where.second_numbers),
        WIDE=where.needs_64_bit_offsets(_COUNT_BLOCK),
        BLOCK=_COUNT_BLOCK,
    )
    return valid


def _launch(
    kernel: Any,
    programs: int,
    config: Config,
    where: Pairs,
    operands: Sequence[Tensor | None],
    eps: float | Tensor,
    gradient_strides: Sequence[int] = (),
    **constants: bool,
) -> None:
    launch(
        kernel,
        (programs,),
        *(*operands, *triton_float(eps), *where.numbers(gradient_strides)),
        COMPUTE=triton_arithmetic(arithmetic(where.first, where.second)),
        DENSE=where.is_dense,
        WIDE=where.needs_64_bit_offsets(config.block),
        BLOCK=config.block,
        num_warps=config.warps,
        enable_fp_fusion=False,  # areas round as eager's do, so equal boxes have a loss of 0
        **constants,
    )
