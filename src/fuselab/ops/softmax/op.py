"""The contracts of ``fuselab::softmax`` and, in place, ``fuselab::softmax_``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuselab.op import FusedOp, Gradient, Inputs, Rewrite
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.softmax import declaration, reference
from fuselab.ops.softmax.cuda_launch import CUDA, CUDA_EXPRESSIONS
from fuselab.ops.softmax.declaration import are_narrow_columns
from fuselab.ops.softmax.implementations import (
    CONFIGS,
    implementations,
    implementations_in_place,
)
from fuselab.ops.softmax.layout import neighbours

__all__ = ["CUDA", "CUDA_EXPRESSIONS", "IN_PLACE", "OP"]


def prefer(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Sequence[str]:
    """Return the order on a GPU: CUDA C++ first.

    us, Triton / CUDA (H200, torch 2.11, Triton 3.6, 2026-11-21):
                            4096x16384 float32   2048x65536 float32   1024x262144 bfloat16
        forward             132.6 / 132.9        423.8 / 259.5        545 / 262
        with backward       323.4 / 323.1        1039 / 629           1209 / 642
    (642: timed apart; 323.1: with a forward of 134.5) and (32, 19, 128, 128) over dim 1, float32:
    87.8 / 41.2 and 137.6 / 88.4.
    """
    return ("cuda", "triton")


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Sequence[str]:
    """Return CUDA C++ first on a GPU; on a CPU C++ for columns, and the reference for rows, where
    ATen's own kernel is as fast."""
    if output.is_cuda:
        return ("cuda", "triton")
    rows = neighbours(output, dim) == 1
    return ("reference",) if rows or are_narrow_columns(output, dim) else ("cpp",)


def _rewrite_call(input: Tensor, dim: int) -> Inputs:
    return Inputs((input,), {"dim": dim})


def _library(input: Tensor, dim: int) -> Tensor:
    """torch.softmax, F.softmax, Tensor.softmax and nn.Softmax alike."""
    return torch.softmax(input, dim)


def _naive(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - input.max(dim=dim, keepdim=True).values)
    return term / term.sum(dim=dim, keepdim=True)


def _naive_amax(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - torch.amax(input, dim=dim, keepdim=True))
    return term / torch.sum(term, dim=dim, keepdim=True)


def _naive_item(input: Tensor, dim: int) -> Tensor:
    term = torch.exp(input - input.max(dim=dim, keepdim=True)[0])
    return term / term.sum(dim=dim, keepdim=True)


def _liger() -> Callable[..., Tensor]:
    """Liger's kernel, which takes the last dimension."""
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    def softmax(input: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
        wide = input if dtype is None else input.to(dtype)
        return LigerSoftmaxFunction.apply(wide.movedim(dim, -1)).movedim(-1, dim)

    return softmax


OP = FusedOp(
    name="fuselab::softmax",
    reference=reference.softmax,
    implementations=implementations("softmax"),
    cost=declaration.cost,
    cost_backward=declaration.cost_backward,
    cases=declaration.CASES,
    gradient=Gradient(
        declaration.save, reference.softmax_backward, declaration.fake_gradient, prefer_backward
    ),
    draw=declaration.draw,
    validate=declaration.validates("softmax"),
    fake=declaration.fake,
    prefer=prefer,
    autocast=declaration.autocast,
    rewrites=tuple(
        Rewrite(pattern, _rewrite_call) for pattern in (_library, _naive, _naive_amax, _naive_item)
    ),
    peers={"naive": reference.naive},
    libraries={"liger": _liger},
    dtypes=FLOATING,
    configs=CONFIGS,
    regime=declaration.regime,
    cpu_cases=declaration.CPU_CASES,
)


IN_PLACE = FusedOp(
    name="fuselab::softmax_",
    reference=reference.softmax_,
    implementations=implementations_in_place("softmax"),
    cost=declaration.cost,
    cases=declaration.CASES,
    draw=declaration.draw,
    validate=declaration.validates("softmax"),
    prefer=prefer,
    dtypes=FLOATING,
    mutates=("input",),
    regime=declaration.regime,
    cpu_cases=declaration.CPU_CASES,
)
