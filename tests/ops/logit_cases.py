"""What the tests of linear_sigmoid and linear_binary_cross_entropy share: inputs and comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from linear_cases import LAYOUTS
from torch import Tensor

from fuselab.ops.linear_binary_cross_entropy.op import OP as LOSS
from fuselab.ops.linear_sigmoid.op import OP as SIGMOID
from fuselab.prove.accuracy import Bar

__all__ = [
    "LAYOUTS",
    "SHAPES",
    "assert_each_loss",
    "assert_infinite_targets",
    "check",
    "operands",
]

# Around packs of 4 and 8, a warp's 32 of them, the groups of 4 and 16 rows, 64 parts, and the depth
# past which a backward reads twice.
SHAPES = (
    *((1, 1), (5, 1), (1, 3), (4, 7), (16, 8), (17, 9), (33, 31), (64, 33), (3, 255), (1100, 40)),
    *((31, 256), (9, 257), (2, 1023), (5, 1024), (7, 1025), (1, 2100)),
)

# Logits at which sigmoid rounds to 0 or 1, and infinite ones.
LOGITS = (-120.0, -88.0, -20.0, -1e-7, 0.0, 1e-7, 20.0, 40.0, 88.0, 120.0, math.inf, -math.inf)

Launcher = Callable[..., Tensor]
Backward = Callable[..., tuple[Tensor | None, ...]]


def operands(
    rows: int,
    depth: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    bias: bool = True,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Input, weight, bias and target; logits of about 2, targets 0 or 1 but for a few between."""
    generator = torch.Generator().manual_seed(rows + depth)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    input, weight = normal(rows, depth), 2 * normal(1, depth) * depth**-0.5
    target = (torch.rand((rows, 1), generator=generator) < 0.25).float()
    target[::5] = 0.3
    moved = [value.to(device, dtype) for value in (input, weight, normal(1), target)]
    return moved[0], moved[1], moved[2] if bias else None, moved[3]


def check(
    forward: Launcher,
    backward: Backward,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor | None = None,
    reduction: str | None = None,
    upstreams: Sequence[Tensor] | None = None,
    alone: bool = True,
) -> None:
    """Output and gradients by the project's bar, ``alone`` each gradient by itself too; ``forward``
    and ``backward`` are launchers of linear_sigmoid, with a target and a reduction those of the
    loss.

    The bar and not eager's error of one run: a bias gradient is one number, whose sum eager gets
    right by luck with the vectors of one instruction set and wrong with another's.
    """
    op = SIGMOID if reduction is None else LOSS
    rest = () if reduction is None else (target, reduction)
    output = forward(input, weight, bias, *rest)
    saved = output if reduction is None else target
    more = () if reduction is None else (bias, reduction)
    if upstreams is None:
        generator = torch.Generator().manual_seed(1)
        random = torch.randn(output.shape, generator=generator).to(output)
        upstreams = (random, torch.full((), 0.3).to(output).expand(output.shape))
    leaves = [
        None if value is None else value.detach().clone().requires_grad_()
        for value in (input, weight, bias)
    ]
    present = [place for place, leaf in enumerate(leaves) if leaf is not None]

    def by_reference(values: Sequence[Any]) -> list[Tensor | None]:
        *leaves, target, upstream = values
        result = op.reference(*leaves, *(() if reduction is None else (target, reduction)))
        asked = [leaves[place] for place in present]
        grads = dict(zip(present, torch.autograd.grad(result, asked, upstream), strict=True))
        return [result.detach(), *(grads.get(place) for place in range(3))]

    names = ("output", "gradient 0", "gradient 1", "gradient 2")
    for count, upstream in enumerate(upstreams):
        bar = Bar(by_reference, [*leaves, target, upstream], names)
        assert bar.eager[0] is not None
        assert output.dtype == bar.eager[0].dtype and output.is_contiguous()
        needs = (True, True, bias is not None)
        grads = backward(needs, upstream, saved, input, weight, *more)
        found = list(grads)
        for place in present:
            assert found[place].dtype == input.dtype and found[place].is_contiguous()
        _assert_judged(bar, [output, *found], f"{op.short_name} {reduction}")
        if not (alone and count == 0 and len(upstreams) > 1):
            continue
        for place in present:
            needed = tuple(index == place for index in range(3))
            only = backward(needed, upstream, saved, input, weight, *more)
            assert [grad is not None for grad in only] == list(needed)
            found[place] = only[place]
        _assert_judged(bar, [output, *found], f"{op.short_name} {reduction} alone")


def _assert_judged(bar: Bar, results: Sequence[Tensor | None], what: str) -> None:
    for name, judgement in zip(bar.names, bar.judge(results), strict=True):
        assert judgement.problem is None, f"{what}, {name}: {judgement.problem}"


def assert_infinite_targets(backward: Backward, device: str = "cpu") -> None:
    """The gradient sigmoid(z) - t of each of ``LOGITS``, where a product with an infinite target
    would be NaN once its factor underflows."""
    z = torch.tensor(LOGITS, device=device)[:, None]
    ones = torch.ones_like(z)
    for value in (math.inf, -math.inf, math.nan, 0.0, 0.3, 1.0, 3.0):
        target = torch.full_like(z, value)
        grad = backward((True, False, False), ones, target, z, ones[:1], None, "none")[0]
        expected = torch.sigmoid(z.double()) - target.double()
        if value == 1.0:  # which float64 keeps no digits of either
            expected = -torch.sigmoid(-z.double())
        torch.testing.assert_close(grad.double(), expected, rtol=4e-7, atol=1.2e-38, equal_nan=True)


def assert_each_loss(forward: Launcher, device: str = "cpu") -> None:
    """Each of ``LOGITS`` has its own loss to 4 ulp, where eager's cancels to 0 (in float64 too);
    subnormal ones may be 0. NaN and infinities are eager's."""
    z = torch.tensor(LOGITS, device=device)[:, None]
    for probability in (0.0, 1.0):
        target = torch.full_like(z, probability)
        ours = forward(z, torch.ones_like(z[:1]), None, target, "none")
        eager = F.binary_cross_entropy_with_logits(z, target, reduction="none")
        wide = z.double()
        exact = ((1 - probability) * wide - wide.clamp(max=0)) + torch.log1p(torch.exp(-wide.abs()))
        finite = eager.isfinite()
        torch.testing.assert_close(ours[finite].double(), exact[finite], rtol=4e-7, atol=1.2e-38)
        assert torch.equal(ours[~finite].nan_to_num(7), eager[~finite].nan_to_num(7))
