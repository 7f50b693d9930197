"""Launchers of the CUDA C++ kernels: which one runs, and how pairs are spread over threads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fuselab.ops._shared.dtypes import CUDA_NAMES
from fuselab.ops._shared.template_arguments import cuda_float
from fuselab.ops.generalized_box_iou_loss import configs
from fuselab.ops.generalized_box_iou_loss.configs import SMALL_COUNT, chosen
from fuselab.ops.generalized_box_iou_loss.layout import (
    Epsilon,
    Pairs,
    arithmetic,
    backward_of,
    forward_of,
)
from fuselab.runtime.cuda_source import CudaSource, i64
from fuselab.runtime.gpu_limits import multiprocessors
from fuselab.runtime.grid import ceil_div
from fuselab.runtime.parameters import Scalar

# Without FMA the areas round as eager's do, and equal boxes have a loss of exactly 0.
CUDA = CudaSource(Path(__file__).with_name("cuda_kernels.cu"), options=("-fmad=false",))
_REDUCTIONS = {"none": "kNone", "sum": "kSum", "mean": "kMean", "padded": "kPadded"}

_THREADS = 256  # threads of cuda_kernels.cu
_ONE_BLOCK_THREADS = 1024  # of a reduction by a single block
_FINISH_THREADS = 1024


@forward_of
def forward(where: Pairs, reduction: str, eps: Epsilon, loss: Tensor) -> None:
    """Compute the loss by one launch, or by two for a reduction of more than SMALL_COUNT pairs,
    with a workspace of one float64 per block ("padded": two)."""
    epsilon_type, epsilon = cuda_float(eps, loss.dtype)
    config = chosen("cuda", where, reduction)
    boxes = config.boxes
    if reduction == "none":
        spread, blocks = _spread(where, boxes), ceil_div(where.count, _THREADS * boxes)
        tensors = (where.first, where.second, loss, epsilon)
        _launch("forward", (epsilon_type, *spread), blocks, _THREADS, where, tensors)
        return
    threads = _ONE_BLOCK_THREADS if where.count <= SMALL_COUNT else _THREADS
    blocks = 1
    if where.count > SMALL_COUNT:
        resident = multiprocessors(where.first.device) * config.blocks
        blocks = min(ceil_div(where.count, threads * boxes), resident)
    partial = None
    if blocks > 1:
        sums = 2 if reduction == "padded" else 1
        partial = where.first.new_empty(sums * blocks, dtype=torch.float64)
    spread = _spread(where, boxes, threads * blocks * boxes)
    arguments = (epsilon_type, _REDUCTIONS[reduction], *spread, threads)
    operands = (where.first, where.second, loss, partial, epsilon)
    _launch("reduce", arguments, blocks, threads, where, operands)
    if partial is not None:
        CUDA.launch(
            f"finish<{CUDA_NAMES[loss.dtype]}, {_REDUCTIONS[reduction]}>",
            (1, 1, 1),
            (_FINISH_THREADS, 1, 1),
            (partial, loss, i64(blocks), i64(where.count)),
        )


@backward_of
def backward(
    where: Pairs,
    upstream: Tensor,
    reduction: str,
    eps: Epsilon,
    grads: tuple[Tensor | None, ...],
) -> None:
    """Compute both gradients in one launch. "padded" with more than SMALL_COUNT pairs first counts
    the boxes, in two more launches with a workspace of one int64."""
    valid = None
    if reduction == "padded" and where.count > SMALL_COUNT:
        valid = _count_valid(where)
    boxes = chosen("cuda_backward", where, reduction).boxes
    epsilon_type, epsilon = cuda_float(eps, arithmetic(where.first, where.second))
    _launch(
        "backward",
        (epsilon_type, _REDUCTIONS[reduction], *_spread(where, boxes)),
        ceil_div(where.count, _THREADS * boxes),
        _THREADS,
        where,
        (upstream, where.first, where.second, valid, *grads, epsilon),
        where.gradient_strides,
    )


def _count_valid(where: Pairs) -> Tensor:
    """Return how many second boxes are no padding, as one int64 on the device."""
    valid = torch.zeros(1, dtype=torch.int64, device=where.second.device)
    index, rank, _, _ = _spread(where, 1, 2**20)
    resident = multiprocessors(valid.device) * 8
    CUDA.launch(
        f"count_valid<{CUDA_NAMES[where.second.dtype]}, {index}, {rank}>",
        (min(ceil_div(where.count, _THREADS), resident), 1, 1),
        (_THREADS, 1, 1),
        (where.second, valid, *map(i64, where.second_numbers)),
    )
    return valid


def _launch(
    kernel: str,
    arguments: Sequence[object],
    blocks: int,
    threads: int,
    where: Pairs,
    operands: Sequence[Tensor | Scalar | None],
    gradient_strides: Sequence[int] = (),
) -> None:
    """Launch a kernel of both boxes; ``arguments`` are its template arguments after their types."""
    types = (CUDA_NAMES[where.first.dtype], CUDA_NAMES[where.second.dtype])
    CUDA.launch(
        f"{kernel}<{', '.join(map(str, (*types, *arguments)))}>",
        (blocks, 1, 1),
        (threads, 1, 1),
        (*operands, *map(i64, where.numbers(gradient_strides))),
    )


def _spread(where: Pairs, boxes: int, margin: int = 4 * _THREADS) -> tuple[str, int, str, int]:
    """Return index type, rank, alignment and pairs per thread, as template arguments."""
    index = "int64_t" if where.needs_64_bit_offsets(margin) else "int32_t"
    return index, where.rank, str(where.is_aligned).lower(), boxes


def _expressions() -> tuple[str, ...]:
    """Return the expressions of every kernel, reduction, dtype, rank and both index types, aligned
    and not."""
    found = []
    for dtype, name in CUDA_NAMES.items():
        tensor = torch.empty(0, dtype=dtype)
        real = "double" if dtype == torch.float64 else "float"
        boxes = configs.cuda(tensor, tensor, "none")[0].boxes
        in_flight = configs.cuda(tensor, tensor)[0].boxes
        same = f"{name}, {name}, {real}"
        found += [
            f"forward<{same}, int32_t, 1, true, {boxes}>",
            f"forward<{name}, {name}, const {real}*, int64_t, 3, false, {boxes}>",
            f"reduce<{same}, kSum, int32_t, 2, true, {in_flight}, {_THREADS}>",
            f"reduce<{same}, kMean, int64_t, 1, true, {in_flight}, {_ONE_BLOCK_THREADS}>",
            f"reduce<{same}, kPadded, int32_t, 1, true, {in_flight}, {_THREADS}>",
            f"reduce<{same}, kPadded, int32_t, 3, false, {in_flight}, {_ONE_BLOCK_THREADS}>",
            f"count_valid<{name}, int32_t, 1>",
            f"count_valid<{name}, int64_t, 3>",
            *(
                f"backward<{same}, {reduction}, int32_t, 1, true, {boxes}>"
                for reduction in _REDUCTIONS.values()
            ),
            f"backward<{name}, {name}, const {real}*, kPadded, int64_t, 3, false, {boxes}>",
        ]
    for real in ("float", "double"):
        found += [f"finish<{real}, {reduction}>" for reduction in ("kSum", "kMean", "kPadded")]
    found += [
        "forward<float, __nv_bfloat16, float, int32_t, 1, true, 1>",
        "backward<__half, double, const float*, kMean, int32_t, 1, true, 1>",
    ]
    return tuple(found)


CUDA_EXPRESSIONS = _expressions()
