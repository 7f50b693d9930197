"""Helpers for cases: random operands, and the names and tags that many operators share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, ParamSpec

import torch
from torch import Tensor

from fuselab.op import Inputs
from fuselab.op import sized as sized

Make = Callable[[torch.device, torch.dtype, torch.Generator], Inputs]
Parameters = ParamSpec("Parameters")

BOUNDARY = frozenset({"boundary"})


@dataclass(frozen=True)
class Random:
    """The source of a case's operands. Values are drawn on the CPU, so all devices get the same."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def normal(
        self, *shape: int, deviation: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return normal values around 0, in the case's dtype or ``dtype``."""
        values = torch.randn(shape, generator=self.generator) * deviation
        return values.to(self.device, dtype or self.dtype)

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 values drawn uniformly from [0, 1), on the CPU."""
        return torch.rand(shape, generator=self.generator)

    def moved(self, tensor: Tensor) -> Tensor:
        """Return ``tensor`` on the case's device, in its dtype."""
        return tensor.to(self.device, self.dtype)


def made(
    build: Callable[Concatenate[Random, Parameters], Inputs],
) -> Callable[Parameters, Make]:
    """Turn ``build(random, *parameters)`` into a function of the parameters alone that returns
    ``Case.make``."""

    @functools.wraps(build)
    def make_of(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Make:
        def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
            return build(Random(device, dtype, generator), *args, **kwargs)

        return make

    return make_of


def sweep_tags(tiny: bool, huge: bool = False) -> frozenset[str]:
    """Return the tags of a point of the sweep that ``fuselab bench`` times by default."""
    return frozenset({"bench", "sweep"} | ({"tiny"} if tiny else {"huge"} if huge else set()))


def unchanged(tensor: Tensor) -> Tensor:
    """Return ``tensor`` itself: the default ``lay_out`` of a case."""
    return tensor


# Layouts of a matrix: transposed, with gaps, from an odd place on, and with stride 0.
MATRIX_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda tensor: tensor.t(),
    "every_other": lambda tensor: tensor[:, ::2],
    "offset": lambda tensor: tensor[1:, 3:],
    "one_row": lambda tensor: tensor[:1].expand_as(tensor),
    "one_column": lambda tensor: tensor[:, :1].expand_as(tensor),
}


def tame(tensor: Tensor, root: int) -> Tensor:
    """Clamp the finite values of ``tensor`` to the ``root``-th root of the dtype's largest value,
    in place, and return it. Larger values could overflow in the middle of a sum, and then the order
    of additions would decide between infinity and NaN, which no test can judge."""
    limit = torch.finfo(tensor.dtype).max ** (1 / root)
    memory = tensor.untyped_storage().nbytes() // tensor.element_size()
    elements = tensor.as_strided((memory,), (1,), 0)
    elements.copy_(torch.where(elements.isfinite(), elements.clamp(-limit, limit), elements))
    return tensor
