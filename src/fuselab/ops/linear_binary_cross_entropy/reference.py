"""binary_cross_entropy_with_logits(input Wᵀ + b, target) in plain PyTorch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from fuselab.ops.linear_sigmoid.reference import through_logit


def reference(
    input: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, reduction: str = "mean"
) -> Tensor:
    """Compute ``F.binary_cross_entropy_with_logits(F.linear(input, weight, bias), target)``.

    Args:
        input: any shape ``(..., K)`` of one dimension or more, float32, float16, bfloat16 or
            float64, any strides.
        weight: ``(1, K)``, as ``nn.Linear(K, 1)`` keeps it, in the dtype of ``input``.
        bias: ``(1,)`` or None, in the same dtype.
        target: ``(..., 1)``, the probability of class 1, in any of the four dtypes.
        reduction: "mean" or "sum" over all rows, or "none".

    Returns:
        0-d, or ``(..., 1)`` with "none", in the dtype of ``target``, as in eager PyTorch. Products
        and sums are in float32 whatever ``allow_tf32`` says, sums over rows in float64, and the
        logit is never rounded to 16 bits. The mean of no rows is NaN.

    Differentiable twice in input, weight and bias; a target that requires a gradient is refused.
    The backward keeps only the arguments and computes the logit again while it reads the input. It
    sums the gradients of weight and bias in an order that does not vary from run to run.

    Raises:
        ShapeError, DtypeError, UnknownNameError (reduction, implementation), DeviceError,
        DifferentiationError (target), UnsupportedError (an implementation asked for by name that
        cannot run here).
    """
    logit = F.linear(input, weight, bias)
    if logit.dtype != torch.float64 or target.dtype != torch.float64:
        return F.binary_cross_entropy_with_logits(logit, target, reduction=reduction)
    losses = _exact_losses(logit, target)
    return losses if reduction == "none" else getattr(losses, reduction)()


def _exact_losses(logit: Tensor, target: Tensor) -> Tensor:
    """Compute the losses in float64 to full precision, for use as the reference of a check.

    PyTorch's formula, (1 - t) z - log sigmoid(z), cancels in both tails: for a logit of -45 and a
    target of 0 it gives 0 instead of exp(-45). Here a softplus of -|z| is added to a product, and
    both it and its derivatives keep every digit. The results for infinite logits are PyTorch's.
    """
    positive = (1 - target) * logit + F.softplus(-logit)
    others = F.softplus(logit) - target * logit
    plain = F.binary_cross_entropy_with_logits(logit, target, reduction="none")
    return torch.where(logit.isfinite(), torch.where(logit > 0, positive, others), plain)


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    reduction: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias, computed in float32 (float64 if input or
    target is)."""
    is_double = torch.float64 in (input.dtype, target.dtype)
    arithmetic = torch.float64 if is_double else torch.float32
    logit = F.linear(
        input.to(arithmetic),
        weight.to(arithmetic),
        None if bias is None else bias.to(arithmetic),
    )
    probable = target.to(arithmetic)
    # sigmoid(logit) - target. For each sign of the logit the sigmoid that is small is used: its
    # digits count where it nearly equals the target, and autograd's derivative of it, y (1 - y),
    # keeps its digits too. The two are selected, not multiplied: an infinite target times a sigmoid
    # that underflowed would be NaN.
    near_one = (1 - probable) - torch.sigmoid(-logit)
    of_logit = torch.where(logit > 0, near_one, torch.sigmoid(logit) - probable)
    of_logit = of_logit * grad_output.to(arithmetic)
    if reduction == "mean":
        of_logit = of_logit / max(logit.numel(), 1)
    return (*through_logit(needs[:3], of_logit, input, weight), None)
