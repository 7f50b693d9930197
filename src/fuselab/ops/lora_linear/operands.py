"""The arguments after the input, by name and in the contract's order: a layer and its adapter."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Layer(NamedTuple):
    """A layer and its adapter. ``bias`` is also None where the backward does not use it."""

    weight: Tensor  # (N, K)
    bias: Tensor | None  # (N,)
    lora_a: Tensor  # (r, K)
    lora_b: Tensor  # (N, r)
    scale: float | Tensor
    activation: str
