"""sigmoid(input Wᵀ + b) of a linear layer with one output, in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.ops._shared.matrices import as_rows


def reference(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``sigmoid(input weightᵀ + bias)`` for a last layer of width 1: a probability per row.

    Args:
        input: any shape ``(..., K)`` of one dimension or more, float32, float16, bfloat16 or
            float64, any strides.
        weight: ``(1, K)``, as ``nn.Linear(K, 1)`` keeps it, in the dtype of ``input``.
        bias: ``(1,)`` or None, in the same dtype.

    Returns:
        ``(..., 1)``, contiguous, in the dtype of ``input``. Products and sums are in float32
        whatever ``allow_tf32`` says; the result is rounded once. To train on the probability's
        cross entropy, use ``linear_binary_cross_entropy``: its loss and gradient stay exact where
        this function rounds to 0 or 1.

    Differentiable twice in input, weight and bias. The backward keeps input, weight and output; the
    gradients of weight and bias are summed in an order that does not vary from run to run.

    Raises:
        ShapeError, DtypeError, UnknownNameError (implementation), DeviceError, UnsupportedError
        (an implementation asked for by name that cannot run here).
    """
    return torch.sigmoid(F.linear(input, weight, bias))


def gradient(
    needs: Sequence[bool], grad_output: Tensor, output: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, computed in float32 (float64 if the output
    is)."""
    arithmetic = torch.float64 if output.dtype == torch.float64 else torch.float32
    probability = output.to(arithmetic)
    of_logit = grad_output.to(arithmetic) * probability * (1 - probability)
    return through_logit(needs, of_logit, input, weight)


def through_logit(
    needs: Sequence[bool], of_logit: Tensor, input: Tensor, weight: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias from the logit's gradient ``(..., 1)``. They
    are computed in its dtype and rounded once."""
    rows = as_rows(input).to(of_logit.dtype)
    return (
        (of_logit * weight[0].to(of_logit.dtype)).to(input.dtype) if needs[0] else None,
        torch.mm(as_rows(of_logit).t(), rows).to(weight.dtype) if needs[1] else None,
        of_logit.sum().reshape(1).to(weight.dtype) if needs[2] else None,
    )
