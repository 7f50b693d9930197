"""What the tests of linear_sigmoid and linear_binary_cross_entropy share: inputs and comparison."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from linear_cases import LAYOUTS
from pointwise_cases import assert_within_bar
from torch import Tensor

from fuselab.ops.linear_binary_cross_entropy.op import OP as LOSS
from fuselab.ops.linear_sigmoid.op import OP as SIGMOID

__all__ = ["LAYOUTS", "SHAPES", "assert_each_loss", "check", "operands"]

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
    """Output and gradients against float64 and eager, ``alone`` each gradient by itself too;
    ``forward`` and ``backward`` are launchers of linear_sigmoid, with a target and a reduction
    those of the loss."""
    op = SIGMOID if reduction is None else LOSS
    rest = () if reduction is None else (target, reduction)
    output = forward(input, weight, bias, *rest)

    def leaves(dtype: torch.dtype | None) -> list[Tensor | None]:
        return [
            None if value is None else value.detach().to(dtype or value.dtype).requires_grad_()
            for value in (input.clone(), weight.clone(), None if bias is None else bias.clone())
        ]

    of_eager, of_exact = leaves(None), leaves(torch.float64)
    exact_rest = () if reduction is None else (target.double(), reduction)
    eager, exact = op.reference(*of_eager, *rest), op.reference(*of_exact, *exact_rest)
    assert output.dtype == eager.dtype and output.shape == eager.shape and output.is_contiguous()
    what = f"{op.short_name} {reduction}"
    assert_within_bar(output, eager.detach(), exact.detach(), what)
    saved = output if reduction is None else target
    more = () if reduction is None else (bias, reduction)
    if upstreams is None:
        generator = torch.Generator().manual_seed(1)
        random = torch.randn(output.shape, generator=generator).to(output)
        upstreams = (random, torch.full((), 0.3).to(output).expand(output.shape))
    places = [place for place in range(3) if (input, weight, bias)[place] is not None]
    for count, upstream in enumerate(upstreams):
        needs = (True, True, bias is not None)
        grads = backward(needs, upstream, saved, input, weight, *more)
        theirs, truth = (
            torch.autograd.grad(
                result, [tensors[place] for place in places], grad, retain_graph=True
            )
            for result, tensors, grad in (
                (eager, of_eager, upstream),
                (exact, of_exact, upstream.double()),
            )
        )
        for place, their, true in zip(places, theirs, truth, strict=True):
            assert grads[place].dtype == input.dtype and grads[place].is_contiguous()
            assert_within_bar(grads[place], their, true, f"{what} gradient {place}")
            if alone and count == 0 and len(upstreams) > 1:
                needed = tuple(index == place for index in range(3))
                only = backward(needed, upstream, saved, input, weight, *more)
                assert [grad is not None for grad in only] == list(needed)
                assert_within_bar(only[place], their, true, f"{what} gradient {place} alone")


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
