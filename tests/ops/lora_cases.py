"""What the tests of lora_linear share: operands, and the bar that output and gradients meet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from pointwise_cases import assert_within_bar
from torch import Tensor

from fuselab.ops._shared.saved import save_layer as save
from fuselab.ops.lora_linear.reference import reference

Arguments = tuple[Any, ...]
ALL = (True, False, False, True, True)
RANKS = (1, 2, 3, 8, 15, 16, 17, 33, 64, 65, 100)


def operands(
    rows: int,
    inner: int,
    columns: int,
    rank: int,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    has_bias: bool = True,
    scale: float = 0.5,
) -> Arguments:
    """Arguments of lora_linear whose products are of order 1."""
    generator = torch.Generator().manual_seed(rows + 3 * inner + 5 * columns + 7 * rank)

    def normal(*shape: int, deviation: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * deviation).to(device, dtype)

    deviation = max(inner, 1) ** -0.5
    return (
        normal(rows, inner),
        normal(columns, inner, deviation=deviation),
        normal(columns) if has_bias else None,
        normal(rank, inner, deviation=deviation),
        normal(columns, rank, deviation=rank**-0.5),
        scale,
        activation,
    )


def upstream_of(output: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(output.shape, generator=generator).to(output)


def by_autograd(args: Sequence[Any], upstream: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The reference's output and its gradients of input, lora_a and lora_b, all in ``dtype``."""
    values = [arg.detach().to(dtype) if isinstance(arg, Tensor) else arg for arg in args]
    leaves = [values[place].requires_grad_() for place in (0, 3, 4)]
    output = reference(*values)
    return [output.detach(), *torch.autograd.grad(output, leaves, upstream.to(dtype))]


def check(
    forward: Callable[..., Tensor],
    backward: Callable[..., tuple[Tensor | None, ...]],
    args: Sequence[Any],
    upstream: Tensor | None = None,
) -> None:
    """``forward(*args)`` and ``backward(needs, upstream, *saved)`` against float64 and eager."""
    before = [arg.clone() if isinstance(arg, Tensor) else arg for arg in args]
    output = forward(*args)
    upstream = upstream_of(output) if upstream is None else upstream
    grads = backward(ALL, upstream, *save(output, *args))
    assert grads[1] is None and grads[2] is None
    ours = [output, *(grad for grad in grads if grad is not None)]
    eager = by_autograd(args, upstream, output.dtype)
    exact = by_autograd(args, upstream, torch.float64)
    names = ("output", "input", "lora_a", "lora_b")
    for name, mine, theirs, truth in zip(names, ours, eager, exact, strict=True):
        assert (mine.dtype, mine.is_contiguous()) == (theirs.dtype, True), name
        if name == "output" or args[-1] not in ("relu", "leaky_relu"):
            assert_within_bar(mine, theirs, truth, name)
        else:  # a rounding decides on which side of the kink an output of 0 lies
            assert_within_bar(mine, theirs, _through(output, args, upstream, name), name)
    for arg, copy in zip(args, before, strict=True):
        if isinstance(arg, Tensor):
            assert torch.equal(arg.nan_to_num(), copy.nan_to_num()), "an argument changed"


def _through(output: Tensor, args: Sequence[Any], upstream: Tensor, name: str) -> Tensor:
    """The float64 gradient where relu and leaky_relu keep the side that ``output`` is on."""
    slope = 0.0 if args[-1] == "relu" else 0.01
    pulled = upstream.double() * torch.where(output > 0, 1.0, slope)
    grads = by_autograd((*args[:-1], "identity"), pulled, torch.float64)
    return grads[("output", "input", "lora_a", "lora_b").index(name)]


def laid_out(args: Sequence[Any], lay_out: Callable[[Tensor], Tensor]) -> Arguments:
    """Every matrix of the arguments in another layout."""
    return tuple(
        lay_out(arg) if isinstance(arg, Tensor) and arg.dim() == 2 else arg for arg in args
    )
