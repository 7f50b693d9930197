"""An operator with configurations: input * scale in plain Python, tile by tile.

Small tiles are slow; ``tile=7`` leaves the tail out, wrong where 7 does not divide; ``tile=0``
raises.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fuselab.op import Case, Cost, FusedOp, Gradient, Implementation, Inputs
from fuselab.runtime.tuning import Config, chosen

NAME = "tuned::scaled"
TILES = (16, 1024, 7, 0)


def reference(input: Tensor, scale: float = 2.0) -> Tensor:
    """input * scale."""
    return input * scale


def gradient(needs: Sequence[bool], grad_output: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    return (grad_output * scale if needs[0] else None,)


def candidates(*args: object) -> list[Config]:
    return [Config(tile=tile) for tile in TILES]


def in_tiles(input: Tensor, scale: float, tile: int) -> Tensor:
    output = torch.zeros_like(input)  # what is left out is wrong, whatever lay in the memory
    read, written = input.reshape(-1), output.view(-1)
    numel = input.numel() // 7 * 7 if tile == 7 else input.numel()
    for start in range(0, numel, tile):
        stop = min(start + tile, numel)
        torch.mul(read[start:stop], scale, out=written[start:stop])
    return output


def forward(input: Tensor, scale: float) -> Tensor:
    config = chosen(NAME, "plain", (input.dtype, "any size"), candidates())
    return in_tiles(input, scale, config.tile)


def backward(needs: Sequence[bool], grad_output: Tensor, scale: float) -> tuple[Tensor | None, ...]:
    config = chosen(NAME, "plain_backward", "any size", candidates())
    return (in_tiles(grad_output, scale, config.tile),)


def cost(input: Tensor, scale: float) -> Cost:
    return Cost(4 * input.numel(), 4 * input.numel(), input.numel())


def case(numel: int) -> Case:
    def make(device: torch.device, dtype: torch.dtype, generator: torch.Generator) -> Inputs:
        return Inputs((torch.randn(numel, generator=generator).to(device, dtype),))

    return Case(str(numel), make, frozenset({"bench"}))


OP = FusedOp(
    name=NAME,
    reference=reference,
    implementations={"plain": Implementation("cpu", forward, backward)},
    cost=cost,
    cost_backward=cost,
    cases=[case(1000), case(4099)],
    gradient=Gradient(lambda output, input, scale: (scale,), gradient),
    configs={"plain": candidates, "plain_backward": candidates},
)
