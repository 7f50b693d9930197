"""Launchers of the C++ kernels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from fuselab.ops._shared.dtypes import CPP_NAMES
from fuselab.ops._shared.template_arguments import cpp_float
from fuselab.ops.generalized_box_iou_loss.layout import (
    Epsilon,
    Pairs,
    arithmetic,
    backward_of,
    forward_of,
)
from fuselab.runtime.cpp_source import CppSource, i32, i64
from fuselab.runtime.parameters import Scalar

CPP = CppSource(Path(__file__).with_name("cpu_kernels.cpp"))
_REDUCTIONS = ("none", "sum", "mean", "padded")  # as cpu_kernels.cpp counts them


@forward_of
def forward(where: Pairs, reduction: str, eps: Epsilon, loss: Tensor) -> None:
    """Compute the loss in one pass over the boxes."""
    if reduction == "none":
        _launch("forward", where, (where.first, where.second, loss), eps)
    else:
        kind = i32(_REDUCTIONS.index(reduction))
        _launch("reduce", where, (where.first, where.second, loss, kind), eps)


@backward_of
def backward(
    where: Pairs,
    upstream: Tensor,
    reduction: str,
    eps: Epsilon,
    grads: tuple[Tensor | None, ...],
) -> None:
    """Compute both gradients in one pass over the boxes; "padded" first counts them in another."""
    kind = i32(_REDUCTIONS.index(reduction))
    operands = (upstream, where.first, where.second, *grads, kind)
    _launch("backward", where, operands, eps, where.gradient_strides)


def _launch(
    kernel: str,
    where: Pairs,
    operands: Sequence[Tensor | Scalar | None],
    eps: float | Tensor,
    gradient_strides: Sequence[int] = (),
) -> None:
    epsilon = cpp_float(eps, arithmetic(where.first, where.second))
    types = f"{CPP_NAMES[where.first.dtype]}, {CPP_NAMES[where.second.dtype]}"
    numbers = map(i64, where.numbers(gradient_strides))
    CPP.launch(f"{kernel}<{types}>", (*operands, epsilon, *numbers))
