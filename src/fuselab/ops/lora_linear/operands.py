"""A layer and its adapter by name: what the contract passes behind the input, in its order."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """``bias`` is None, too, where the backward has no use for it."""

    weight: Tensor  # (N, K)
    bias: Tensor | None  # (N,)
    lora_a: Tensor  # (r, K)
    lora_b: Tensor  # (N, r)
    scale: float | Tensor
    activation: str
