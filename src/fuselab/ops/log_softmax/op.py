"""The contracts of ``fuselab::log_softmax`` and, in place, ``fuselab::log_softmax_``.

The kernels are softmax's, in their other form: see ``ops/softmax``.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.op import FusedOp, Gradient, Inputs, Rewrite
from fuselab.ops._shared.dtypes import FLOATING
from fuselab.ops.log_softmax import reference
from fuselab.ops.softmax import declaration
from fuselab.ops.softmax.cuda_launch import CUDA, CUDA_EXPRESSIONS
from fuselab.ops.softmax.declaration import are_narrow_columns
from fuselab.ops.softmax.implementations import (
    CONFIGS,
    implementations,
    implementations_in_place,
)

__all__ = ["CUDA", "CUDA_EXPRESSIONS", "IN_PLACE", "OP"]


def prefer(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Sequence[str]:
    """Return the order on a GPU: CUDA C++ first.

    us, ATen / Triton / CUDA, forward with backward (H200, torch 2.11, 2026-11-21): 4096x1024
    float32 27.6 / 24.8 / 25.0, 4096x16384 414 / 324 / 322, 2048x65536 1078 / 938 / 631, (32, 19,
    128, 128) over dim 1 105 / 137 / 81; bfloat16 4096x16384 202 / 196 / 169.
    """
    return ("cuda", "triton")


def prefer_backward(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype
) -> Sequence[str]:
    """Return CUDA C++ first on a GPU; on a CPU C++, but for narrow columns."""
    if output.is_cuda:
        return ("cuda", "triton")
    return ("reference",) if are_narrow_columns(output, dim) else ("cpp",)


def _rewrite_call(input: Tensor, dim: int) -> Inputs:
    return Inputs((input,), {"dim": dim})


def _library(input: Tensor, dim: int) -> Tensor:
    """torch.log_softmax, F.log_softmax, Tensor.log_softmax and nn.LogSoftmax alike."""
    return torch.log_softmax(input, dim)


def _log_of_softmax(input: Tensor, dim: int) -> Tensor:
    """-inf where softmax underflows; log_softmax is finite there."""
    return torch.log(F.softmax(input, dim))


def _minus_logsumexp(input: Tensor, dim: int) -> Tensor:
    return input - torch.logsumexp(input, dim=dim, keepdim=True)


OP = FusedOp(
    name="fuselab::log_softmax",
    reference=reference.log_softmax,
    implementations=implementations("log_softmax"),
    cost=declaration.cost,
    cost_backward=declaration.cost_backward,
    cases=declaration.CASES,
    gradient=Gradient(
        declaration.save, reference.log_softmax_backward, declaration.fake_gradient, prefer_backward
    ),
    draw=declaration.draw,
    validate=declaration.validates("log_softmax"),
    fake=declaration.fake,
    prefer=prefer,
    autocast=declaration.autocast,
    rewrites=tuple(
        Rewrite(pattern, _rewrite_call) for pattern in (_library, _log_of_softmax, _minus_logsumexp)
    ),
    peers={"naive": reference.naive},
    dtypes=FLOATING,
    configs=CONFIGS,
    regime=declaration.regime,
    cpu_cases=declaration.CPU_CASES,
)

IN_PLACE = FusedOp(
    name="fuselab::log_softmax_",
    reference=reference.log_softmax_,
    implementations=implementations_in_place("log_softmax"),
    cost=declaration.cost,
    cases=declaration.CASES,
    draw=declaration.draw,
    validate=declaration.validates("log_softmax"),
    prefer=prefer,
    dtypes=FLOATING,
    mutates=("input",),
    regime=declaration.regime,
    cpu_cases=declaration.CPU_CASES,
)
