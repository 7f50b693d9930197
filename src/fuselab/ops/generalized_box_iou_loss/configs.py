"""Configurations that tuning may choose from: the pairs that a thread or program has in flight, and
the blocks or programs per multiprocessor of a reduction."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuselab.ops.generalized_box_iou_loss.layout import Pairs, arithmetic
from fuselab.runtime import tuning
from fuselab.runtime.tuning import Config

# The most pairs that one block of cuda_kernels.cu reduces, and whose boxes all blocks count: one
# multiprocessor should read their 262 KB of float32 boxes in about the time of a second launch.
SMALL_COUNT = 8192


def cuda(
    first: Tensor, second: Tensor, reduction: str = "padded", eps: float = 0.0
) -> tuple[Config, ...]:
    """Return the candidates: ``boxes`` is pairs per thread, ``blocks`` those per multiprocessor of
    a reduction.

    By default a thread has 16 bytes of each operand in flight, or a whole box if that is larger. In
    a reduction, whose fewer blocks loop, it has twice that except in float64: 64 KB per
    multiprocessor.
    """
    boxes = _boxes(first, second)
    if reduction == "none":
        return _first(Config(boxes=boxes), [Config(boxes=other) for other in (1, 2, 4)])
    boxes *= 1 if arithmetic(first, second) == torch.float64 else 2
    others = [Config(boxes=other, blocks=blocks) for other in (1, 2, 4) for blocks in (2, 4, 8)]
    return _first(Config(boxes=boxes, blocks=4), others)


def cuda_backward(
    needs: Sequence[bool], grad_output: Tensor, first: Tensor, second: Tensor, *rest: Any
) -> tuple[Config, ...]:
    """Return the candidates; ``boxes`` is pairs per thread."""
    return _first(Config(boxes=_boxes(first, second)), [Config(boxes=other) for other in (1, 2, 4)])


def triton(
    first: Tensor, second: Tensor, reduction: str = "padded", eps: float = 0.0
) -> tuple[Config, ...]:
    """Return the candidates: ``block`` is pairs per program of ``warps`` warps, ``programs`` those
    per multiprocessor of a reduction."""
    if reduction == "none":
        return _TRITON
    return tuple(
        Config(block=config.block, warps=config.warps, programs=programs)
        for programs in (8, 4, 16)
        for config in _TRITON
    )


def triton_backward(*rest: Any) -> tuple[Config, ...]:
    """Return the candidates; ``block`` is pairs per program of ``warps`` warps."""
    return _TRITON


# By default a thread has 2 boxes of each operand: 64 bytes of float32 in flight. The backward of
# both takes 55 registers in float32 and 122 in float64 (sm_90, Triton 3.7.1), with 512 pairs 93 and
# 242. Accesses are 128 bits wide; threads exchange values only for the loss and in float64.
_TRITON = tuple(
    Config(block=block, warps=warps)
    for block, warps in ((256, 4), (128, 4), (512, 4), (512, 8), (1024, 8))
)


def _boxes(first: Tensor, second: Tensor) -> int:
    return 2 if max(first.element_size(), second.element_size()) == 2 else 1


def _first(default: Config, others: Sequence[Config]) -> tuple[Config, ...]:
    return default, *(config for config in others if config != default)


CONFIGS: Mapping[str, Callable[..., Sequence[Config]]] = {
    "cuda": cuda,
    "cuda_backward": cuda_backward,
    "triton": triton,
    "triton_backward": triton_backward,
}


def chosen(implementation: str, where: Pairs, reduction: str) -> Config:
    """Return the configuration to launch with, which is tuned per dtypes, reduction and power of
    two of pairs. ``implementation`` is a key of ``CONFIGS``."""
    first, second = where.first, where.second
    before = ((), first) if implementation.endswith("_backward") else ()
    candidates = CONFIGS[implementation](*before, first, second, reduction)
    prefix = "padded_" if reduction == "padded" else ""
    count = min((where.count - 1).bit_length(), 20)
    key = (first.dtype, second.dtype, reduction, f"2^{count}")
    return tuning.chosen(
        f"fuselab::{prefix}generalized_box_iou_loss", implementation, key, candidates
    )
