"""The spellings of a linear layer with a low-rank adapter that ``fuselab.fuse`` replaces."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Inputs, Rewrite
from fuselab.ops._shared.activations import ACTIVATIONS

Update = Callable[..., Tensor]


def rewrites() -> Iterator[Rewrite]:
    """Yield the patterns: the scale after or between the adapter's products, the update cast to the
    layer's dtype (as peft does) or not, with and without a bias, and every activation's
    spellings."""
    for update in (_scaled_last, _scaled_between):
        for has_bias in (True, False):
            for cast in (False, True):
                for entry in ACTIVATIONS.values():
                    for activate in entry.spellings:
                        yield _rewrite(update, has_bias, cast, entry.name, activate)


def _scaled_last(input: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    return F.linear(F.linear(input, lora_a), lora_b) * scale


def _scaled_between(input: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    return F.linear(F.linear(input, lora_a) * scale, lora_b)


def _rewrite(
    update: Update, has_bias: bool, cast: bool, activation: str, activate: Callable[..., Tensor]
) -> Rewrite:
    def layer(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
    ) -> Tensor:
        base = F.linear(input, weight, bias)
        total = base + update(input, lora_a, lora_b, scale)
        return activate(total.to(base.dtype) if cast else total)

    def call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        lora_a: Tensor,
        lora_b: Tensor,
        scale: float,
    ) -> Inputs:
        return Inputs((input, weight, bias, lora_a, lora_b, scale, activation))

    if has_bias:
        return Rewrite(layer, call)
    return Rewrite(
        lambda input, weight, lora_a, lora_b, scale: layer(
            input, weight, None, lora_a, lora_b, scale
        ),
        lambda input, weight, lora_a, lora_b, scale: call(
            input, weight, None, lora_a, lora_b, scale
        ),
    )
