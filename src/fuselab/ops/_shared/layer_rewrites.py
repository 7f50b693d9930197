"""Rewrites of what follows a linear layer, with and without a bias."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch.nn.functional as F
from torch import Tensor

from fuselab.op import Inputs, Rewrite


def layer_rewrites(after: Callable[[Tensor], Tensor], *rest: str) -> Iterator[Rewrite]:
    """Yield the rewrites of ``after(F.linear(input, weight, bias))``, with and without a bias, for
    an operator that takes the layer's tensors and then ``rest``."""

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Inputs:
        return Inputs((input, weight, bias, *rest))

    yield Rewrite(lambda input, weight, bias: after(F.linear(input, weight, bias)), call)
    yield Rewrite(
        lambda input, weight: after(F.linear(input, weight)),
        lambda input, weight: call(input, weight),
    )
