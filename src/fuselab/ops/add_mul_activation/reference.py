"""act(input + scale * update + bias) in plain PyTorch: the definition of what is right."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.ops import activations


def reference(
    input: Tensor,
    update: Tensor,
    bias: Tensor | None = None,
    scale: float = 1.0,
    activation: str = "relu",
) -> Tensor:
    """See ``fuselab.ops.add_mul_activation``."""
    total = input + scale * update
    if bias is not None:
        total = total + bias
    return activations.activation(activation).function(total)


def gradient(
    needs: Sequence[bool],
    grad_output: Tensor,
    output: Tensor | None,
    input: Tensor | None,
    update: Tensor | None,
    bias: Tensor | None,
    scale: float,
    activation: str,
    input_dtype: torch.dtype,
    update_dtype: torch.dtype,
    bias_dtype: torch.dtype | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of input, update and bias.

    ``output`` is there for the activations whose derivative is a function of it, ``input``,
    ``update`` and ``bias`` for those that need the pre-activation; identity needs neither.
    Arithmetic is in float32, in float64 where the output is.
    """
    arithmetic = torch.float64 if grad_output.dtype == torch.float64 else torch.float32
    saved = output.to(arithmetic) if output is not None else grad_output
    if input is not None and update is not None:
        saved = input.to(arithmetic) + scale * update.to(arithmetic)
        if bias is not None:
            saved = saved + bias.to(arithmetic)
    upstream = grad_output.to(arithmetic)
    total = activations.activation(activation).pullback(upstream, saved)
    return (
        total.to(input_dtype) if needs[0] else None,
        (scale * total).to(update_dtype) if needs[1] else None,
        total.sum_to_size(total.shape[-1:]).to(bias_dtype) if needs[2] else None,
    )
