"""The gradients of ``act(input Wᵀ + bias)``: one pass of ours, then the library's products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from fuselab.ops._shared.matrices import as_rows, depth_aligned, linear
from fuselab.ops.add_mul_activation.layout import Gradients, Saved, preactivation_gradient

PullBack = Callable[[Sequence[bool], Tensor, Saved], Gradients]


def gradients(
    pull_back: PullBack,
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of input, weight and bias.

    One pass computes the pre-activation's gradient and sums the bias's; a library product (cuBLAS)
    then gives each of the other two. ``pull_back`` is a backward launcher of
    ``add_mul_activation``. If the activation's derivative needs the pre-activation, one more
    library product computes it.
    """
    needs_total = needs[0] or needs[1]

    def recompute() -> Tensor:
        return linear(as_rows(input), weight, bias).view_as(grad_output)

    total, grad_bias = preactivation_gradient(
        pull_back, (needs_total, needs[2]), grad_output, output, activation, recompute
    )
    if not needs_total:
        return None, None, grad_bias
    assert total is not None
    rows = as_rows(total)
    depth = weight.shape[1]
    grad_input = grad_weight = None
    if needs[0]:
        (right,) = depth_aligned(*rows.shape, weight)
        grad_input = torch.mm(rows, right)
        if grad_input.shape[1] > depth:
            grad_input = grad_input[:, :depth].contiguous()
        grad_input = grad_input.view(input.shape)
    if needs[1]:
        (right,) = depth_aligned(*rows.shape, as_rows(input))
        grad_weight = torch.mm(rows.t(), right)
        if grad_weight.shape[1] > depth:
            grad_weight = grad_weight[:, :depth].contiguous()
    return grad_input, grad_weight, grad_bias
