"""What the tests of mlp share: inputs, and the comparison with float64 and eager."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from pointwise_cases import assert_within_bar
from torch import Tensor

from fuselab.ops.mlp.reference import reference

DLRM = ((13, 512, 256, 64, 16), (368, 512, 256, 1))
# Around the tile's 16 rows, units of 8 and 16 columns, steps of 32 in depth and groups of 128 and
# 256; weights whose rows do not begin on 16 bytes; widths of 1.
SHAPES = (
    (1, (1, 1)),
    (2, (3, 1)),
    (15, (8, 16)),
    (16, (32, 32)),
    (17, (13, 33)),
    (31, (40, 8, 24)),
    (33, (16, 31, 17, 1)),
    (64, (129, 264, 8)),
    (65, (33, 511, 7)),
    (5, (13, 17, 33, 511, 3)),
    (40, (24, 512, 40, 1, 24)),
    (3, (256, 264, 128, 120)),
    (70, (9,) * 17),
)


def operands(
    rows: int,
    widths: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Standard normal input and biases; weights that keep its size through a relu."""
    generator = torch.Generator().manual_seed(rows + sum(widths))

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(device, dtype)

    weights = [normal(n, k, scale=(2 / max(k, 1)) ** 0.5) for k, n in pairwise(widths)]
    biases = [normal(n) for n in widths[1:]] if bias else []
    return normal(rows, widths[0]), weights, biases


def check(
    forward: Callable[..., Tensor],
    input: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    activation: str = "relu",
    output_activation: str = "identity",
    dtype: torch.dtype | None = None,
    what: str = "",
) -> None:
    """``forward`` against the reference in float64."""
    output = forward(input, weights, biases, activation, output_activation, dtype)
    eager = reference(input, weights, biases, activation, output_activation, dtype)
    exact = reference(
        input.double(),
        [weight.double() for weight in weights],
        [bias.double() for bias in biases],
        activation,
        output_activation,
    )
    assert output.dtype == eager.dtype and output.is_contiguous()
    assert_within_bar(output, eager, exact, what)
